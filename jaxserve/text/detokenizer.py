"""Token ids to text as they come, equal to decoding all of them at once.

Every piece's text is final when it comes, save bytes: a run of byte tokens is text only as a whole
(one invalid byte turns each of the run's bytes into U+FFFD), so a run is held back until an
ordinary piece, or the end, closes it. Each token costs one look-up. One object per sequence, used
by one thread.
"""

from collections.abc import Iterable

from jaxserve.text.tokenizer import Tokenizer

_NONE_HIDDEN: frozenset[int] = frozenset()


class Detokenizer:
    """The text of one sequence."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._pieces = tokenizer.pieces
        self._hidden = tokenizer.special_ids if skip_special_tokens else _NONE_HIDDEN
        self._byte_run = bytearray()

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these ids make final. An id outside the vocabulary is no text."""
        text: list[str] = []
        for token_id in token_ids:
            if token_id in self._hidden:
                continue
            piece = self._pieces.get(token_id)
            if isinstance(piece, int):
                self._byte_run.append(piece)
            elif piece is not None:
                if self._byte_run:
                    text.append(self.finish())
                text.append(piece)
        return "".join(text)

    def length(self, token_id: int) -> int:
        """Return how many characters an id alone is: none for a byte, or what is hidden."""
        piece = "" if token_id in self._hidden else self._pieces.get(token_id, "")
        return 0 if isinstance(piece, int) else len(piece)

    def finish(self) -> str:
        """Return what is held back; the sequence, or a run of bytes, is at its end."""
        run = bytes(self._byte_run)
        self._byte_run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)
