"""One choice as its reader sees it: token ids go in, text that is final comes out.

However the ids are split into pushes, the joined text is the same. No I/O.
"""

from collections.abc import Sequence

from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.stop_strings import StopAutomaton, StopStrings
from jaxserve.text.tokenizer import Tokenizer


class ChoiceText:
    """Detokenizes one sequence and ends it at its first stop string.

    Attributes:
        num_tokens: ids taken, up to the one that completed a stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: StopAutomaton, hidden_ids: frozenset[int]
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self._hidden_ids = hidden_ids
        self.num_tokens = 0

    @property
    def stop_hit(self) -> str | None:
        """The stop string that ended the text; nothing may be pushed after it."""
        return self._stops.hit

    def push(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Take a step's ids; return the text they settle and the ids that count.

        Ids after the one that completes a stop string do not count.
        """
        texts = []
        # One id at a time, because which id completed the stop string counts.
        for count, token_id in enumerate(token_ids, start=1):
            if token_id not in self._hidden_ids:
                texts.append(self._stops.push(self._detokenizer.push((token_id,))))
                if self._stops.hit is not None:
                    token_ids = token_ids[:count]
                    break
        self.num_tokens += len(token_ids)
        return "".join(texts), tuple(token_ids)

    def finish(self) -> str:
        """Return what was held back; may still find a stop string in it."""
        text = self._stops.push(self._detokenizer.finish())
        return text if self._stops.hit is not None else text + self._stops.finish()
