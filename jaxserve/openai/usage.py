"""What a request used, in tokens and in time, as the answers tell it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request: each prompt once however many choices it has, end ids counted."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def to_wire(self) -> dict[str, object]:
        """Give OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a request's time went, in three intervals that follow each other.

    Attributes:
        queue_s: until the first of its sequences began to be computed.
        prompt_s: from there until the first of its tokens.
        predicted_s: from there until the last.
        num_prompt: prompt tokens that had to be computed, each prompt's once.
        num_forced: of the predicted tokens, those that took no step, for a grammar left no choice.
        grammar_path: what kept the answers to their grammar, "device" or "host"; None: nothing.
    """

    queue_s: float
    prompt_s: float
    predicted_s: float
    num_cached: int
    num_prompt: int
    num_predicted: int
    num_forced: int = 0
    grammar_path: str | None = None

    def to_wire(self) -> dict[str, object]:
        """Give the `timings` of llama.cpp's server, the time in the queue, and a grammar's part."""
        return {
            "queue_ms": round(self.queue_s * 1e3, 3),
            "cache_n": self.num_cached,
            **_timing("prompt", self.num_prompt, self.prompt_s),
            **_timing("predicted", self.num_predicted, self.predicted_s),
            "forced_n": self.num_forced,
            "grammar_path": self.grammar_path,
        }


def _timing(name: str, count: int, time_s: float) -> dict[str, object]:
    return {
        f"{name}_n": count,
        f"{name}_ms": round(time_s * 1e3, 3),
        f"{name}_per_token_ms": round(time_s * 1e3 / count, 3) if count else None,
        f"{name}_per_second": round(count / time_s, 3) if time_s > 0 else None,
    }
