"""What cuts an answer beside its budget: too many calls, a loop, the time."""

from typing import Literal

from jaxserve.openai.options import Repetition

CutBy = Literal["calls", "max_tool_calls", "repetition", "timeout"]
"""Why an answer was cut; "calls": one call at a time was asked for."""


class LoopDetector:
    """Tells when a sequence's last ids are one pattern, repeated often enough."""

    def __init__(self, repetition: Repetition) -> None:
        self._sizes = range(repetition.min_size, repetition.max_size + 1)
        self._repeats = repetition.min_count - 1
        self._matched = [0] * len(self._sizes)
        self._ids: list[int] = []

    def push(self, token_id: int) -> bool:
        """Take the next id; returns whether the sequence is in a loop now."""
        ids, num_ids = self._ids, len(self._ids)
        is_loop = False
        for at, size in enumerate(self._sizes):
            # So many of the last ids are equal to those `size` before them.
            if size <= num_ids and ids[num_ids - size] == token_id:
                self._matched[at] += 1
                is_loop = is_loop or self._matched[at] >= size * self._repeats
            else:
                self._matched[at] = 0
        ids.append(token_id)
        return is_loop


def finish_details(cut_by: CutBy | None) -> dict[str, object]:
    """Return the field of an answer that says what cut it."""
    if cut_by is None or cut_by == "calls":
        return {}
    return {"finish_details": {"type": cut_by}}
