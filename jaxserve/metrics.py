"""The server's Prometheus metrics, on a registry of their own.

Every name has the prefix `jaxserve_`; behind it stand vLLM's names, which the Gateway API's
inference extension reads (queue, running, KV use), wherever vLLM has a metric of that meaning. The
engine feeds them once a step or once a request, never once a token: a step's share is under 20 µs.
Any thread.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

_LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
_HOST_BUCKETS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class Metrics:
    """All metrics; attributes are the ones that other rooms feed directly."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._info = Info(
            "jaxserve", "What was chosen at start-up, by its flags.", registry=self._registry
        )
        self._http = self._counter(
            "http_requests", "HTTP requests by endpoint and status.", "endpoint", "status"
        )
        finished = self._counter(
            "request_success", "Sequences that ended, by reason.", "finished_reason"
        )
        self._finished = {
            reason: finished.labels(finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Tokens prefilled, recomputed ones included."
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens that were looked for among the cached ones."
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens that were found there, and not computed."
        )
        self._prefix_evictions = self._counter(
            "prefix_cache_evictions", "Cached full-attention pages that made room for others."
        )
        self._point_evictions = self._counter(
            "resume_point_evictions", "Resume points whose sliding pages made room for others."
        )
        self._preemptions = self._counter(
            "num_preemptions", "Sequences that lost their pages and were computed anew."
        )
        self._guided = self._counter(
            "guided_requests",
            "Sequences with a grammar that began, by what keeps them to it: device or host.",
            "path",
        )
        self._forced_tokens = self._counter(
            "guided_forced_tokens", "Tokens that took no step: their grammar left no choice."
        )
        self._loosened = self._counter(
            "loosened_tools",
            "Tools of requests whose calls were held to their syntax, but not to their schemas.",
        )
        self._tool_calls = self._counter("tool_calls", "Calls of tools in answers.")
        self._turn_faults = self._counter(
            "turn_faults",
            "Departures from a turn's syntax; all but not_a_call and no_tools were put right.",
            "fault",
        )
        self.serving_compiles = self._counter(
            "serving_compiles", "Programs compiled after start-up; 0 by contract."
        )

        self._ttft = self._histogram("time_to_first_token_seconds", "Submission to first token.")
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean gap between a sequence's tokens, once it ended.",
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Submission to last token.")
        self._queue = self._histogram(
            "request_queue_time_seconds", "Submission to the first prefill."
        )
        self._step = self._histogram(
            "step_duration_seconds", "A step's time on the device: the gap of running streams."
        )
        self._host = self._histogram(
            "host_step_seconds",
            "Host work of a step: schedule, dispatch, settle, publish.",
            _HOST_BUCKETS_S,
        )

        self._running = self._gauge("num_requests_running", "Sequences that hold a slot.")
        self._waiting = self._gauge(
            "num_requests_waiting", "Sequences that wait for a slot or for pages."
        )
        self._pages = [
            (
                self._gauge(f"{kind}_free", f"{text} that nobody holds."),
                self._gauge(f"{kind}_used", f"{text} that sequences hold."),
                self._gauge(
                    f"{kind}_cached",
                    f"{text} of cached prefixes that nobody uses: evicted when needed.",
                ),
            )
            for kind, text in (
                ("kv_pages", "Full-attention KV pages"),
                ("kv_sliding_pages", "Sliding layers' KV pages"),
            )
        ]
        self._resume_points = self._gauge(
            "resume_points", "Positions of cached prefixes that sliding layers can go on from."
        )
        self._kv_usage = self._gauge(
            "kv_cache_usage_perc", "Share of the KV pages in use, of the kind in shorter supply."
        )

    def set_info(self, **labels: str) -> None:
        """Tell what was chosen at start-up."""
        self._info.info(labels)

    def observe_http(self, endpoint: str, status: int) -> None:
        """Count an answered HTTP request."""
        self._http.labels(endpoint=endpoint, status=str(status)).inc()

    def observe_finished(
        self,
        reason: str,
        *,
        num_output_tokens: int,
        num_forced_tokens: int = 0,
        queue_s: float | None,
        ttft_s: float | None,
        total_s: float,
    ) -> None:
        """Count a sequence that ended with stop, length or abort, and its times since submission.

        A time is None where the sequence never got there.
        """
        self._finished[reason].inc()
        self._forced_tokens.inc(num_forced_tokens)
        self._e2e.observe(total_s)
        if queue_s is not None:
            self._queue.observe(queue_s)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
            if num_output_tokens > 1:
                self._tpot.observe((total_s - ttft_s) / (num_output_tokens - 1))

    def observe_turn(self, num_calls: int, faults: Sequence[str]) -> None:
        """Count an answer's calls, and what of it was not as it should be."""
        if num_calls:
            self._tool_calls.inc(num_calls)
        for fault in faults:
            self._turn_faults.labels(fault=fault).inc()

    def observe_failed(self) -> None:
        """Count a sequence that a fault ended."""
        self._finished["error"].inc()

    def observe_settled(
        self, duration_s: float, num_prompt_tokens: int, num_generated_tokens: int
    ) -> None:
        """Note a step that the device has done."""
        self._step.observe(duration_s)
        self._generation_tokens.inc(num_generated_tokens)
        if num_prompt_tokens:
            self._prompt_tokens.inc(num_prompt_tokens)

    def observe_looked_up(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count an admitted sequence's prompt, and what of it was cached."""
        self._prefix_queries.inc(num_prompt_tokens)
        self._prefix_hits.inc(num_cached_tokens)

    def observe_evicted(self, *, num_pages: int, num_points: int) -> None:
        """Count cached full-attention pages and resume points that made room for others."""
        self._prefix_evictions.inc(num_pages)
        self._point_evictions.inc(num_points)

    def observe_preempted(self, count: int) -> None:
        """Count sequences that lost their pages."""
        self._preemptions.inc(count)

    def observe_guided(self, path: str) -> None:
        """Count a sequence with a grammar."""
        self._guided.labels(path=path).inc()

    def observe_loosened(self, count: int) -> None:
        """Count tools whose schemas are not enforced."""
        self._loosened.inc(count)

    def observe_host(self, duration_s: float) -> None:
        """Note one pass of the device thread, waits left out."""
        self._host.observe(duration_s)

    def set_load(self, *, num_running: int, num_waiting: int) -> None:
        """Set the gauges of the sequences that are live."""
        self._running.set(num_running)
        self._waiting.set(num_waiting)

    def set_pages(self, full: tuple[int, int, int], sliding: tuple[int, int, int]) -> None:
        """Set the gauges of both kinds' free, used and cached pages; the last are not in use."""
        usages = []
        for gauges, counts in zip(self._pages, (full, sliding), strict=True):
            for gauge, count in zip(gauges, counts, strict=True):
                gauge.set(count)
            usages.append(counts[1] / max(sum(counts), 1))
        self._kv_usage.set(max(usages))

    def set_resume_points(self, count: int) -> None:
        """Set how many resume points there are."""
        self._resume_points.set(count)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"jaxserve_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"jaxserve_{name}", text, registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS_S
    ) -> Histogram:
        return Histogram(f"jaxserve_{name}", text, buckets=buckets, registry=self._registry)
