"""The ids that a model's turns were generated as, for when they come back as text.

A client sends the model's turns back with the next request, and a text's usual ids need not be
those that were generated: the prompt would part from the cached one at the first such token. So
what was generated is remembered by the message that it became and the ids that came before it. It
stands in for its usual ids where a new prompt has the same ids before it, and then the same bytes,
with the same control tokens among them. A prompt's text never changes by it.

Bounded, the least recently used is forgotten first; a salt's turns are known to that salt alone.
Event loop only, but for `restore` and `turn_starts`, which are pure.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from jaxserve.text.tokenizer import Tokenizer

MAX_TURN_BYTES = 16 << 20
"""For some 10,000 turns of 250 tokens."""

# A template opens the model's turn with a control token and a few words: a longer opening has none.
_MAX_OPENING = 64
_ENTRY_BYTES = 600
_MAX_PLACES = 256  # of one text: an agent that says "done" says it often
_FIRST_CONTROL = 0x10000


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn from the control token that opens it to its last generated id.

    `start` is the position of its first id, in the prompt it was generated for as in those to come;
    `before` is a digest of the ids in front of it.
    """

    start: int
    before: bytes
    ids: "array[int]"


class TurnMemory:
    """Turns by salt and message."""

    def __init__(self, max_bytes: int = MAX_TURN_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_message: OrderedDict[bytes, dict[bytes, Turn]] = OrderedDict()

    def remember(
        self,
        salt: str | None,
        message: str,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        tokenizer: Tokenizer,
    ) -> None:
        """Remember that a message (`spoken_as`) was these ids; the end id is none of them."""
        start = _opening(prompt_ids, tokenizer)
        if start is None or not output_ids:
            return
        before = _digest(array("i", prompt_ids[:start]).tobytes())
        turn = Turn(start, before, array("i", (*prompt_ids[start:], *output_ids)))
        key = _key(salt, message)
        known = self._by_message.pop(key, {})
        self._num_bytes -= _size(known)
        known.pop(before, None)
        known[before] = turn
        if len(known) > _MAX_PLACES:
            del known[next(iter(known))]
        self._by_message[key] = known
        self._num_bytes += _size(known)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(self._by_message.popitem(last=False)[1])

    def forget(self) -> None:
        """Forget all turns."""
        self._by_message.clear()
        self._num_bytes = 0

    def find(self, salt: str | None, messages: Iterable[str]) -> list[Turn]:
        """Return the turns that became one of these messages (`spoken_as`)."""
        found: list[Turn] = []
        for key in {_key(salt, message): None for message in messages}:
            if key in self._by_message:
                self._by_message.move_to_end(key)
                found += self._by_message[key].values()
        return found


def spoken_as(text: str, call_ids: Sequence[str]) -> str:
    """Name the model's message: by its calls, which are its alone, or by its text."""
    return "\0".join(("calls", *call_ids)) if call_ids else text


def turn_starts(ids: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the positions of a prompt where earlier turns of the model begin, as its last does."""
    start = _opening(ids, tokenizer)
    if start is None:
        return ()
    opening = ids[start:]
    found, at = [], 0
    while (at := ids.index(opening[0], at)) < start:
        if ids[at : at + len(opening)] == opening:
            found.append(at + len(opening))
        at += 1
    return tuple(found)


def restore(ids: Sequence[int], turns: Iterable[Turn], tokenizer: Tokenizer) -> list[int]:
    """Put the turns' ids in the place of others that spell the same, where they stood before."""
    restored = list(ids)
    # In order: a turn is where it was only once all turns before it are as they were.
    for turn in sorted(turns, key=lambda turn: turn.start):
        if _digest(array("i", restored[: turn.start]).tobytes()) != turn.before:
            continue
        end = _end_of_same(restored, turn, tokenizer)
        if end is not None:
            restored[turn.start : end] = turn.ids
    return restored


def _opening(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> int | None:
    """Return the position of the control token that opens the turn to be generated."""
    end = len(prompt_ids)
    openings = range(end - 1, max(end - 1 - _MAX_OPENING, -1), -1)
    return next((i for i in openings if prompt_ids[i] in tokenizer.special_ids), None)


def _end_of_same(ids: Sequence[int], turn: Turn, tokenizer: Tokenizer) -> int | None:
    """Find where the ids from the turn's start on have spelled what it does; None: nowhere.

    A control token follows there, or nothing: else it is only the beginning of another turn.
    """
    expected = "".join(_spelling(token_id, tokenizer) for token_id in turn.ids)
    at = 0
    for i in range(turn.start, len(ids)):
        spelling = _spelling(ids[i], tokenizer)
        if not expected.startswith(spelling, at):
            return None
        at += len(spelling)
        if at == len(expected):
            is_end = i + 1 == len(ids) or ids[i + 1] in tokenizer.special_ids
            return i + 1 if is_end else None
    return None


def _spelling(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a character for each byte, or one that no byte has for a control token.

    So a control token is not the text that spells the same.
    """
    if token_id in tokenizer.special_ids:
        return chr(_FIRST_CONTROL + token_id)
    piece = tokenizer.piece(token_id)
    return chr(piece) if isinstance(piece, int) else piece.encode().decode("latin-1")


def _key(salt: str | None, message: str) -> bytes:
    return _digest(f"{'' if salt is None else salt}\0{message}".encode())


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _size(turns: dict[bytes, Turn]) -> int:
    return sum(_ENTRY_BYTES + turn.ids.itemsize * len(turn.ids) for turn in turns.values())
