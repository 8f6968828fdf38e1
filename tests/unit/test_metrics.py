import pytest

from jaxserve.metrics import Metrics


def lines(metrics: Metrics) -> set[str]:
    return set(metrics.render().decode().splitlines())


def test_http_requests_are_counted_by_endpoint_and_status() -> None:
    metrics = Metrics()
    metrics.observe_http("/v1/completions", 200)
    metrics.observe_http("/v1/completions", 200)
    metrics.observe_http("/v1/models", 404)
    assert {
        'jaxserve_http_requests_total{endpoint="/v1/completions",status="200"} 2.0',
        'jaxserve_http_requests_total{endpoint="/v1/models",status="404"} 1.0',
    } <= lines(metrics)


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_a_finished_request_is_counted_with_its_times(reason: str) -> None:
    metrics = Metrics()
    metrics.observe_finished(reason, num_output_tokens=4, queue_s=0.5, ttft_s=1.0, total_s=4.0)
    assert {
        f'jaxserve_request_success_total{{finished_reason="{reason}"}} 1.0',
        "jaxserve_request_queue_time_seconds_sum 0.5",
        "jaxserve_time_to_first_token_seconds_sum 1.0",
        "jaxserve_e2e_request_latency_seconds_sum 4.0",
        "jaxserve_request_time_per_output_token_seconds_sum 1.0",
    } <= lines(metrics)


def test_a_request_that_never_ran_has_no_token_times() -> None:
    metrics = Metrics()
    metrics.observe_finished("abort", num_output_tokens=0, queue_s=None, ttft_s=None, total_s=4.0)
    assert {
        "jaxserve_request_queue_time_seconds_count 0.0",
        "jaxserve_time_to_first_token_seconds_count 0.0",
        "jaxserve_request_time_per_output_token_seconds_count 0.0",
        "jaxserve_e2e_request_latency_seconds_count 1.0",
    } <= lines(metrics)


def test_load_gauges() -> None:
    metrics = Metrics()
    metrics.set_load(num_running=3, num_waiting=2)
    metrics.set_pages((5, 2, 1), (3, 1, 0))
    metrics.set_resume_points(7)
    assert {
        "jaxserve_num_requests_running 3.0",
        "jaxserve_num_requests_waiting 2.0",
        "jaxserve_kv_pages_free 5.0",
        "jaxserve_kv_pages_cached 1.0",
        "jaxserve_kv_pages_used 2.0",
        "jaxserve_kv_sliding_pages_free 3.0",
        "jaxserve_kv_sliding_pages_cached 0.0",
        "jaxserve_kv_sliding_pages_used 1.0",
        "jaxserve_resume_points 7.0",
        "jaxserve_kv_cache_usage_perc 0.25",
    } <= lines(metrics)


def test_what_was_chosen_at_start_is_told() -> None:
    metrics = Metrics()
    metrics.set_info(attention="pallas", kv_dtype="int8")
    assert 'jaxserve_info{attention="pallas",kv_dtype="int8"} 1.0' in lines(metrics)


def test_serving_compiles_start_at_zero() -> None:
    metrics = Metrics()
    assert "jaxserve_serving_compiles_total 0.0" in lines(metrics)
    metrics.serving_compiles.inc()
    assert "jaxserve_serving_compiles_total 1.0" in lines(metrics)


def test_two_registries_do_not_share() -> None:
    one, other = Metrics(), Metrics()
    one.observe_preempted(2)
    one.observe_failed()
    assert "jaxserve_num_preemptions_total 2.0" in lines(one)
    assert "jaxserve_num_preemptions_total 0.0" in lines(other)


def test_every_name_has_the_prefix() -> None:
    names = [line.split()[2] for line in lines(Metrics()) if line.startswith("# TYPE")]
    assert names
    assert all(name.startswith("jaxserve_") for name in names)
