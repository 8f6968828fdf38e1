"""Compiled grammars laid out for those who run them: the device, or guides on the host.

Any thread.
"""

from collections.abc import Callable, Collection, Sequence
from threading import Lock

from jaxserve.device.arena import distances, pack
from jaxserve.guided import tables as guided
from jaxserve.guided.forced import canonical
from jaxserve.guided.guide import TablesGuide, opened_start, start_of
from jaxserve.guided.host import HostTokenizer
from jaxserve.guided.masks import num_words
from jaxserve.guided.triggered import Opening, anything, opened
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.types import Grammar

_TOO_LARGE = "its tables are too large for the device"
_NO_ROOM = "its tables have no room for the states and classes of what goes before it"


class Layouts:
    """Lays grammars out for one model."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        *,
        encode: Callable[[str], Sequence[int]],
        vocab_size: int,
        arena_rows: int,
    ) -> None:
        """`vocab_size` is the model's; the device has `arena_rows` for grammars.

        `encode` gives a text's ids without a BOS.
        """
        self.vocabulary = vocabulary
        self._encode = encode
        self._vocab_size = vocab_size
        self._arena_rows = arena_rows
        self._num_words = num_words(max(vocab_size, vocabulary.size))
        self._host_tokenizer = _HostTokenizer(vocabulary)

    def lay_out(
        self,
        key: str,
        compiled: guided.Grammar | None,
        openings: Sequence[Opening],
        stop_ids: Collection[int],
    ) -> Grammar:
        """Return a grammar behind its openings, each of which goes before those that it follows.

        `key` names all of it; a grammar of None is anything. Ids of `stop_ids` are forced nowhere.
        """
        if isinstance(compiled, guided.HostGrammar):
            return self._on_host(compiled, openings, compiled.reason)
        if compiled is None:
            compiled = anything(self._vocab_size)
        tables = compiled
        try:
            for opening in openings:
                tables = opened(
                    tables,
                    opening,
                    vocab_size=self._vocab_size,
                    is_text_V=self.vocabulary.is_text_V,
                )
        except guided.TablesTooLargeError:
            return self._on_host(compiled, openings, _NO_ROOM)
        tables, forced_id_S = canonical(tables, self._encode, never=stop_ids)
        distance_S = distances(tables)
        # One row of the arena is the header's, one the end ids'.
        image = pack(tables, key, self._vocab_size, self._arena_rows - 2, distance_S)
        return Grammar(
            start=lambda: TablesGuide(tables, distance_S, forced_id_S),
            image=image,
            host_reason=_TOO_LARGE if image is None else None,
            min_tokens=int(distance_S[guided.START_STATE]),
            loosened=compiled.loosened,
        )

    def _on_host(
        self, compiled: guided.Grammar, openings: Sequence[Opening], reason: str
    ) -> Grammar:
        start = start_of(compiled, self._host_tokenizer.get, num_words=self._num_words)
        for opening in openings:
            start = opened_start(
                start,
                opening,
                vocab_size=self._vocab_size,
                is_text_V=self.vocabulary.is_text_V,
                num_words=self._num_words,
            )
        return Grammar(start=start, host_reason=reason, loosened=compiled.loosened)


class _HostTokenizer:
    """The tokenizer of grammars on the host, which takes seconds to make: once, when needed."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._made: HostTokenizer | None = None
        self._lock = Lock()

    def get(self) -> HostTokenizer:
        """Return it. Any thread."""
        with self._lock:
            if self._made is None:
                self._made = HostTokenizer(self._vocabulary)
            return self._made
