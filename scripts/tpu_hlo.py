"""Optimised HLO as the TPU compiler prints it: what runs, and what it is estimated to take.

Plain instructions carry the compiler's own cycles. A Pallas kernel carries none: its time is given
by the caller (scripts/tpu_kernels.py). Gathers carry none either and are counted by their bytes.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

CLOCK_HZ = 1.75e9
HBM_BYTES_PER_S = 1.417e12  # streamed on a real v6e

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
MOVES_NOTHING = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional"}
IN_PLACE = {"parameter", "tuple", "bitcast", "scatter", "dynamic-update-slice"}


class Array(NamedTuple):
    """One array of an instruction's result."""

    elements: int
    num_bytes: int
    in_vmem: bool


class Instruction(NamedTuple):
    """A line of optimised HLO: `called` are the computations it names, `rest` is what follows."""

    opcode: str
    results: tuple[Array, ...]
    called: tuple[str, ...]
    rest: str


class Kernel(NamedTuple):
    """A Pallas kernel at its operands' shapes; `num_bytes` is what its call says that it moves.

    `dtypes` are as HLO has them, such as "bf16" and "s32".
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    dtypes: tuple[str, ...] = ()


class Cost(NamedTuple):
    """Estimated time: the compiler's cycles, and what it does not count: gathers and kernels."""

    cycles_ms: float
    gather_ms: float
    kernel_ms: float


def parse_instruction(line: str) -> Instruction | None:
    """Read one line of a computation; None for any other line."""
    found = re.match(r"\s*(?:ROOT )?%[\w.\-]+ = (.*?) ([a-z][\w\-]*)\((.*)", line)
    if not found:
        return None
    shapes, opcode, rest = found.groups()
    results = []
    for dtype, dims, layout in re.findall(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", shapes):
        elements = math.prod(int(dim) for dim in dims.split(",") if dim)
        results.append(Array(elements, elements * ITEM_BYTES.get(dtype, 4), "S(1)" in layout))
    named = re.findall(r"(?:calls|condition|body|branch_computations)=(\{.*?\}|%[\w.\-]+)", rest)
    return Instruction(opcode, (*results,), (*re.findall(r"%([\w.\-]+)", " ".join(named)),), rest)


def kernel_of(step: Instruction) -> Kernel | None:
    """Return the Pallas kernel that a step calls; None for any other step."""
    if step.opcode != "custom-call" or 'custom_call_target="tpu_custom_call"' not in step.rest:
        return None
    name = re.search(r'op_name="(?:[^"]*/)?([^"/]+)/pallas_call', step.rest)
    operands = re.search(r"operand_layout_constraints=\{(.*?\})\}", step.rest)
    moved = re.search(r'"bytes_accessed":"(\d+)"', step.rest)
    if name is None or operands is None or moved is None:
        raise ValueError(f"a kernel without a name, operands or a cost: {step.rest[:400]}")
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", operands[1])
    return Kernel(
        name[1],
        tuple(tuple(int(dim) for dim in dims.split(",") if dim) for _, dims in arrays),
        int(moved[1]),
        tuple(dtype for dtype, _ in arrays),
    )


def own_cost(step: Instruction, kernel_ms: Mapping[Kernel, float]) -> Cost:
    """Return what a step takes besides what it calls.

    A gather's bytes are read from HBM, and written there too unless VMEM takes them.
    """
    if kernel := kernel_of(step):
        return Cost(0.0, 0.0, kernel_ms[kernel])
    if cycles := re.search(r'"estimated_cycles":"(\d+)"', step.rest):
        return Cost(int(cycles[1]) / CLOCK_HZ * 1e3, 0.0, 0.0)
    if step.opcode != "fusion" or not re.search(r'op_name="[^"]*gather"', step.rest):
        return Cost(0.0, 0.0, 0.0)
    num_bytes = sum(array.num_bytes * (1 if array.in_vmem else 2) for array in step.results)
    return Cost(0.0, num_bytes / HBM_BYTES_PER_S * 1e3, 0.0)


class Hlo:
    """An optimised module as the compiler prints it."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.kernel_ms: Mapping[Kernel, float] = {}
        body: list[Instruction] = []
        for line in text.splitlines():
            if header := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
                body = self.computations[header[1]] = []
                self.entry = header[1]  # the last one stays
            elif instruction := parse_instruction(line):
                body.append(instruction)

    def cost(self, choose: Callable[..., Cost], computation: str | None = None) -> Cost:
        """Add up a computation; of a conditional's branches `choose`, min or max, takes one."""
        parts = []
        for step in self.computations[computation or self.entry]:
            if step.opcode == "conditional":
                parts.append(choose((self.cost(choose, name) for name in step.called), key=sum))
            elif step.opcode == "while":
                condition, loop = step.called
                parts += [self.cost(choose, loop)] * self._trips(condition)
            else:
                parts.append(own_cost(step, self.kernel_ms))
        return Cost(*(sum(part[i] for part in parts) for i in range(3)))

    def _trips(self, condition: str) -> int:
        """Return a counted loop's trips; 1 where data decides."""
        bounds = [step.rest for step in self.computations[condition] if step.opcode == "constant"]
        return int(bounds[0].split(")")[0]) if len(bounds) == 1 else 1

    def steps(self, computation: str | None = None) -> list[Instruction]:
        """List what can run, loops and branches included; a fusion is one step."""
        found = list(self.computations[computation or self.entry])
        for step in tuple(found):
            if step.opcode in ("while", "conditional"):
                found += [inner for name in step.called for inner in self.steps(name)]
        return found

    def kernels(self) -> list[Kernel]:
        """List the kernels that can run, one for each call."""
        return [kernel for step in self.steps() if (kernel := kernel_of(step))]

    def pool_copies(self, pools: set[int]) -> list[str]:
        """Name what makes a whole pool anew, all but updates in place; `pools` in elements."""

        def is_pool(step: Instruction) -> bool:
            return any(array.elements in pools for array in step.results)

        def is_in_place(step: Instruction) -> bool:
            if step.opcode == "custom-call" and "output_to_operand_aliasing=" in step.rest:
                return True
            inner = self.computations[step.called[0]] if step.opcode == "fusion" else [step]
            return all(i.opcode in IN_PLACE for i in inner if is_pool(i))

        moving = [step for step in self.steps() if step.opcode not in MOVES_NOTHING]
        return [step.opcode for step in moving if is_pool(step) and not is_in_place(step)]
