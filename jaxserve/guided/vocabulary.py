"""A tokenizer's vocabulary as bytes: what each token id adds to a text, and the tree of them all.

Built once for a tokenizer. Control tokens and unused ids are in no text and in no mask. Some
control tokens can stand in a grammar as characters of plane 16, one each (`marks`); no other token
holds such a character, so text cannot spell them.

Letters: V vocabulary, N nodes of the tree.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

FIRST_MARK = 0x100000
MAX_MARKS = 0x1000
_PLANE_16_LEAD = 0xF4
_UNUSED = re.compile(r"<unused\d+>|\[multimodal\]|<mask>")


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The nodes of one depth, those of the depth before being their parents."""

    parent_N: NDArray[np.int32]
    byte_N: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class GrammarVocabulary:
    """What grammars know of a tokenizer.

    Attributes:
        token_bytes: by id, the bytes that a token adds; b"" for tokens that no grammar allows.
        marks: by id, the character that stands for a control token.
    """

    token_bytes: tuple[bytes, ...]
    marks: Mapping[int, str]

    @classmethod
    def build(
        cls,
        pieces: Mapping[int, str | int],
        *,
        control_ids: Iterable[int] = (),
        vocab_size: int | None = None,
    ) -> "GrammarVocabulary":
        """Make one of a tokenizer's pieces: by id its text, or the byte that it stands for.

        `control_ids` are tokens that are no text; ids up to `vocab_size` have masks.
        """
        control = frozenset(control_ids)
        size = max(max(pieces, default=-1) + 1, vocab_size or 0)
        token_bytes = [b""] * size
        for token_id, piece in pieces.items():
            if token_id in control or (isinstance(piece, str) and _UNUSED.fullmatch(piece)):
                continue
            text = bytes([piece]) if isinstance(piece, int) else piece.encode(errors="replace")
            if _PLANE_16_LEAD not in text:
                token_bytes[token_id] = text
        marks = {}
        for number, token_id in enumerate(sorted(control)[:MAX_MARKS]):
            if token_id < size:
                marks[token_id] = chr(FIRST_MARK + number)
                token_bytes[token_id] = marks[token_id].encode()
        return cls(tuple(token_bytes), marks)

    @property
    def size(self) -> int:
        """How many ids there are: V."""
        return len(self.token_bytes)

    def is_text(self, token_id: int) -> bool:
        """Say whether an id stands for text."""
        is_known = 0 <= token_id < self.size and token_id not in self.marks
        return is_known and bool(self.token_bytes[token_id])

    @cached_property
    def digest(self) -> str:
        """Name the vocabulary: equal for equal ones, whatever the process."""
        hashed = hashlib.sha256()
        for text in self.token_bytes:
            hashed.update(len(text).to_bytes(4, "little") + text)
        return hashed.hexdigest()

    @cached_property
    def is_text_V(self) -> NDArray[np.bool_]:
        """Which ids stand for text, bool [V]."""
        is_text_V = np.array([bool(text) for text in self.token_bytes], np.bool_)
        is_text_V[list(self.marks)] = False
        return is_text_V

    @cached_property
    def spells_all_bytes(self) -> bool:
        """Whether any text at all can be written, byte by byte if need be."""
        single = {text for text in self.token_bytes if len(text) == 1}
        return len(single) >= _PLANE_16_LEAD

    @cached_property
    def tree(self) -> "TokenTree":
        """The tree of all tokens' bytes."""
        return TokenTree.of(self.token_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """The tokens' bytes as a tree, level by level.

    Attributes:
        levels: level 0 has the nodes of first bytes, whose parent is the root, 0.
        level_V, node_V: int32, where a token ends: its level and its node in that; -1 for none.
    """

    levels: tuple[Level, ...]
    level_V: NDArray[np.int32]
    node_V: NDArray[np.int32]

    @classmethod
    def of(cls, token_bytes: tuple[bytes, ...]) -> "TokenTree":
        """Build the tree; sorted, so that nodes of one level are found by comparing neighbours."""
        ids = [token_id for token_id, text in enumerate(token_bytes) if text]
        ids.sort(key=token_bytes.__getitem__)
        texts = [token_bytes[token_id] for token_id in ids]
        sizes = np.array([len(text) for text in texts], np.int32)
        longest = int(sizes.max(initial=0))
        letters = np.zeros((len(texts), longest), np.uint8)
        flat = np.frombuffer(b"".join(texts), np.uint8)
        column = np.arange(longest)
        letters[column < sizes[:, None]] = flat
        level_V = np.full(len(token_bytes), -1, np.int32)
        node_V = np.full(len(token_bytes), -1, np.int32)
        token_ids = np.array(ids, np.intp)
        levels = []
        rows = np.arange(len(texts))
        node = np.zeros(len(texts), np.int32)
        for depth in range(longest):
            alive = sizes[rows] > depth
            rows, parent = rows[alive], node[alive]
            byte = letters[rows, depth]
            new = np.ones(len(rows), np.bool_)
            new[1:] = (parent[1:] != parent[:-1]) | (byte[1:] != byte[:-1])
            node = (np.cumsum(new) - 1).astype(np.int32)
            levels.append(Level(parent[new], byte[new]))
            ends = sizes[rows] == depth + 1
            level_V[token_ids[rows[ends]]] = depth
            node_V[token_ids[rows[ends]]] = node[ends]
        return cls(tuple(levels), level_V, node_V)
