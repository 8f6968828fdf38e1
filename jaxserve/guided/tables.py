"""What a grammar compiles to: tables over token ids, or text for a matcher on the host.

Letters: S states, C token classes, D distinct masks, V vocabulary, W mask words, ⌈V/32⌉.
Immutable; any thread.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

START_STATE = 0
DEAD_STATE = -1
MAX_STATES = 32_767
"""States are int16."""
MAX_CLASSES = 65_535
"""Classes are uint16."""

_SCHEMAS_PER_TIME = 6
MAX_TIME_FACTOR = 4.0

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "calls"]


class TablesTooLargeError(Exception):
    """The grammar has more states or classes than tables can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """What a text has to be.

    Attributes:
        source: JSON of the schema; the regular expression, matched against the whole text; a JSON
            list of the choices; the Lark grammar; "" for json_object; a `calls.CallsSource`.
        compact: no space after `,` and `:`; else one is allowed. JSON kinds only.
        num_schemas: that it is made of; compiling many may take longer than compiling one.
    """

    kind: GrammarKind
    source: str = ""
    compact: bool = False
    num_schemas: int = field(default=1, compare=False)

    @property
    def time_factor(self) -> float:
        """How many times a usual grammar's CPU time compiling it may take."""
        return min(1 + (self.num_schemas - 1) / _SCHEMAS_PER_TIME, MAX_TIME_FACTOR)

    @property
    def digest(self) -> str:
        """Name the spec: equal for equal specs, whatever the process."""
        parts = json.dumps([self.kind, self.source, self.compact])
        return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()


class GrammarStats(NamedTuple):
    """How large the tables are; bytes as they lie here."""

    num_states: int
    num_classes: int
    num_masks: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTables:
    """A grammar over token ids; state 0 is the start. Arrays are read-only.

    After token `t` in state `s` comes `next_SC[s, class_of_V[t]]`, and -1 means that `t` is not
    allowed there: exactly where bit `t` of the state's mask is 0. Ids past the end of `class_of_V`
    are never allowed.

    Attributes:
        class_of_V: uint16; ids of one class act alike in every state. As they are compiled, class
            0 is allowed nowhere: control tokens, end ids, unused ids. What goes before a grammar
            (`guided.triggered`) may allow it.
        next_SC: int16.
        mask_id_S: int32, the state's row of `masks_DW`.
        masks_DW: uint32, packed as `guided.masks` says.
        accepting_S: bool; the text may end exactly here. End ids are in no mask: who samples adds
            them where this is true.
        forced_byte_S: int16, the only byte that can follow, or -1 where the text may end or more
            than one byte can follow.
        forced_next_S: int16, the state after that byte, or -1.
        loosened: names of tools whose calls are well formed, and no more, though more was asked.
    """

    class_of_V: NDArray[np.uint16]
    next_SC: NDArray[np.int16]
    mask_id_S: NDArray[np.int32]
    masks_DW: NDArray[np.uint32]
    accepting_S: NDArray[np.bool_]
    forced_byte_S: NDArray[np.int16]
    forced_next_S: NDArray[np.int16]
    loosened: tuple[str, ...] = ()

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}

    def freeze(self) -> None:
        """Let nobody write to the arrays."""
        for array in self.arrays.values():
            array.setflags(write=False)

    @property
    def stats(self) -> GrammarStats:
        """Count states, classes, masks and bytes."""
        num_states, num_classes = self.next_SC.shape
        arrays = (self.class_of_V, self.next_SC, self.mask_id_S, self.masks_DW, self.accepting_S)
        num_bytes = sum(array.nbytes for array in arrays)
        return GrammarStats(num_states, num_classes, len(self.masks_DW), num_bytes)

    def advance(self, state: int, token_id: int) -> int:
        """Return the state after a token, -1 where it is not allowed."""
        if not 0 <= token_id < len(self.class_of_V):
            return DEAD_STATE
        return int(self.next_SC[state, self.class_of_V[token_id]])

    def allowed_V(self, state: int) -> NDArray[np.bool_]:
        """Return bool [V], the ids that may follow in a state, end ids left out."""
        allowed: NDArray[np.bool_] = self.next_SC[state, self.class_of_V] >= 0
        return allowed

    def forced_bytes(self, state: int, max_bytes: int) -> bytes:
        """Return the first bytes that must follow, up to where a choice or an end comes."""
        forced = bytearray()
        while len(forced) < max_bytes and (byte := int(self.forced_byte_S[state])) >= 0:
            forced.append(byte)
            state = int(self.forced_next_S[state])
        return bytes(forced)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGrammar:
    """A grammar that needs a stack, or whose tables are too large: a matcher on the host runs it.

    `jaxserve.guided.host` makes matchers of it; equal grammars are equal.

    Attributes:
        text: the grammar in llguidance's form, JSON.
        reason: why it has no tables.
        loosened: as in TokenTables.
    """

    text: str
    reason: str
    loosened: tuple[str, ...] = ()


Grammar = TokenTables | HostGrammar
