"""Matchers on the host, for grammars that have no tables; llguidance does the work.

llguidance is an optional dependency (extra `guided`): without it such grammars are refused. One
tokenizer serves all matchers; a matcher belongs to one sequence and one thread.
"""

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import SchemaError
from jaxserve.guided.masks import packed
from jaxserve.guided.tables import HostGrammar
from jaxserve.guided.vocabulary import GrammarVocabulary


def library() -> ModuleType:
    """Return llguidance.

    Raises:
        SchemaError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise SchemaError(
            "this grammar needs the package llguidance, which is not installed (extra `guided`)",
            code="unsupported_schema",
        ) from error
    return llguidance


def check_grammar(grammar: HostGrammar) -> None:
    """Refuse a grammar that no matcher could be made of.

    Raises:
        SchemaError: the library cannot read it, or is not installed.
    """
    message = str(library().LLMatcher.validate_grammar(grammar.text)).strip()
    if message and not message.startswith("WARNING"):
        raise _unreadable(message)


def _unreadable(message: str) -> SchemaError:
    return SchemaError(f"the grammar cannot be used: {message.partition(chr(10))[0]}")


class _Wrapped:
    """The vocabulary in the form that the library asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        in_no_text = [
            token_id
            for token_id, text in enumerate(vocabulary.token_bytes)
            if not text or token_id in vocabulary.marks
        ]
        if not in_no_text:
            raise SchemaError(
                "the tokenizer has no control token to end a text with", code="unsupported_schema"
            )
        # Which one is of no matter: ends are told by `is_accepting`, and masks hold none.
        self.eos_token_id = in_no_text[0]
        self.special_token_ids = in_no_text
        self.tokens = list(vocabulary.token_bytes)
        for token_id in in_no_text:
            self.tokens[token_id] = b"\xff[%d]" % token_id

        ids_of_bytes = {text: token_id for token_id, text in enumerate(self.tokens)}
        # A byte's own token, which is for what no other spells, is not how text is written.
        first = self.tokens.index(b"\0") if b"\0" in self.tokens else 0
        own = {(token_id, bytes([byte])) for byte, token_id in enumerate(range(first, first + 256))}
        self._id_of = ids_of_bytes | {
            text: token_id
            for token_id, text in enumerate(self.tokens)
            if (token_id, text) not in own
        }
        self._longest = max(map(len, self._id_of))

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize, the longest token first.

        Asked for where only one text can follow; its first token is all that a mask allows then, so
        that without one, or with a wrong one, masks are wrong.
        """
        data = text.encode() if isinstance(text, str) else text
        ids = []
        start = 0
        while start < len(data):
            ends = range(min(start + self._longest, len(data)), start, -1)
            end = next((end for end in ends if data[start:end] in self._id_of), None)
            if end is None:
                break
            ids.append(self._id_of[data[start:end]])
            start = end
        return ids


class HostTokenizer:
    """The vocabulary as matchers know it; takes a second and 140 MB to make at 262,144 tokens."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        made_by = library()
        wrapped = _Wrapped(vocabulary)
        self.tokenizer: Any = made_by.LLTokenizer(
            made_by.TokenizerWrapper(wrapped), slices=made_by.LLTokenizer.json_slices()
        )
        text_V = np.ones(vocabulary.size, np.bool_)
        # Control tokens are in masks where the grammar names them, and nowhere else; but the one
        # that ends texts for the library is in all masks of texts that may end.
        text_V[wrapped.eos_token_id] = False
        self.text_W = packed(text_V)


class HostMatcher:
    """How far one text is in a grammar."""

    def __init__(self, tokenizer: HostTokenizer, grammar: HostGrammar) -> None:
        """Begin a text.

        Raises:
            SchemaError: the library cannot read the grammar.
        """
        self._tokenizer = tokenizer
        self._matcher: Any = library().LLMatcher(tokenizer.tokenizer, grammar.text, log_level=0)
        if self._matcher.is_error():
            raise _unreadable(str(self._matcher.get_error()).strip())

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def fill_mask(self, row_W: NDArray[np.uint32]) -> None:
        """Write which ids may follow, packed as `guided.masks` says; end ids are in none.

        `row_W` is contiguous and has ⌈V/32⌉ words or more; more than that become 0.
        """
        words = len(self._tokenizer.text_W)
        row_W[words:] = 0
        own = row_W[:words]
        if self._matcher.is_stopped():
            own[:] = 0
            return
        self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        own &= self._tokenizer.text_W

    def forced_ids(self) -> list[int]:
        """Return ids that must follow: each of them is all that the mask of its place allows."""
        ids: list[int] = self._matcher.compute_ff_tokens()
        return ids

    def advance(self, token_id: int) -> bool:
        """Add a token; False where it is not allowed, and then nothing changes."""
        return bool(self._matcher.try_consume_tokens([token_id]) == 1)

    def copy(self) -> "HostMatcher":
        """Return one that is as far, and goes on by itself."""
        other = object.__new__(HostMatcher)
        other._tokenizer = self._tokenizer
        other._matcher = self._matcher.deep_copy()
        return other
