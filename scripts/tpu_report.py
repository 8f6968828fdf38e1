#!/usr/bin/env python3
"""Compile the server's own step programs for one TPU v6e, without one, and print what they cost.

Needs the extra `tpu`, for libtpu holds the compiler; shapes stand for the weights. All times are
estimated, by the compiler or as bytes over bandwidth: docs/tpu.md. A program takes a minute or two.
"""

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jaxserve.device.buckets import DecodeBucket
from jaxserve.device.memory import PageMix
from jaxserve.device.plan import PAGE_SIZE, extend_buckets, kv_bytes_per_page, make_plan
from jaxserve.device.runner import StepProgram, lowerings, step_programs
from jaxserve.device.state import make_state
from jaxserve.errors import InvariantError
from jaxserve.models.config import AttentionKind, ModelConfig
from jaxserve.models.fields import Fields
from jaxserve.models.gemma4 import read_config
from jaxserve.models.params import Params
from jaxserve.models.specs import abstract_params

DTYPE = "bfloat16"
MAX_COMPILES = 2
CLOCK_HZ = 1.75e9
HBM_BYTES_PER_S = 1.417e12  # streamed on a real v6e
TOKENS_PER_RESUME_POINT = 8192
RESIDENT_BYTES = 28e9  # weights and KV: a pool smaller than VMEM would be copied there and back
DECODE_LIMIT_MS = {8: 5.0, 32: 7.5}  # by rows, for E2B at a context of 8,192

SIZES = {  # model dim, ffn, layers, of them sharing KV, kv heads, sliding layers to each full one
    "e2b": (1536, 6144, 35, 20, 1, 4),
    "e4b": (2560, 10240, 42, 18, 2, 5),
}

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
MOVES_NOTHING = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional"}
COLUMNS = (
    *("program", "weights", "KV", "temp", "aliased", "compile s"),
    *("estimated", "+ gathers", "HBM floor", "all branches", "sorts"),
)

IN_PLACE = {"parameter", "tuple", "bitcast", "scatter", "dynamic-update-slice"}


def model_config(name: str) -> ModelConfig:
    """Describe a Gemma 4 size as its config.json would."""
    model_dim, mlp_dim, num_layers, num_shared, num_kv_heads, num_sliding = SIZES[name]
    full_rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    text = {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": model_dim,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": mlp_dim,
        "use_double_wide_mlp": name == "e2b",
        "num_hidden_layers": num_layers,
        "num_kv_shared_layers": num_shared,
        "layer_types": [*["sliding_attention"] * num_sliding, "full_attention"] * 7,
        "sliding_window": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": full_rope,
        },
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131072,
    }
    return read_config(Fields(text, name))


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


class Cost(NamedTuple):
    """Estimated time: the compiler's cycles, and gathers, which it does not count."""

    cycles_ms: float
    gather_ms: float


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


def own_cost(step: Instruction) -> Cost:
    """Return what a step takes besides what it calls.

    A gather's bytes are read from HBM, and written there too unless VMEM takes them.
    """
    if cycles := re.search(r'"estimated_cycles":"(\d+)"', step.rest):
        return Cost(int(cycles[1]) / CLOCK_HZ * 1e3, 0.0)
    if step.opcode != "fusion" or not re.search(r'op_name="[^"]*gather"', step.rest):
        return Cost(0.0, 0.0)
    num_bytes = sum(array.num_bytes * (1 if array.in_vmem else 2) for array in step.results)
    return Cost(0.0, num_bytes / HBM_BYTES_PER_S * 1e3)


class Hlo:
    """An optimised module as the compiler prints it."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
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
                parts.append(own_cost(step))
        return Cost(sum(part.cycles_ms for part in parts), sum(part.gather_ms for part in parts))

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

    def pool_copies(self, pools: set[int]) -> list[str]:
        """Name what makes a whole pool anew, all but updates in place; `pools` in elements."""

        def is_pool(step: Instruction) -> bool:
            return any(array.elements in pools for array in step.results)

        def is_in_place(step: Instruction) -> bool:
            inner = self.computations[step.called[0]] if step.opcode == "fusion" else [step]
            return all(i.opcode in IN_PLACE for i in inner if is_pool(i))

        moving = [step for step in self.steps() if step.opcode not in MOVES_NOTHING]
        return [step.opcode for step in moving if is_pool(step) and not is_in_place(step)]


def tree_bytes(tree: object) -> int:
    """Return the size of all leaves."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def floor_bytes(program: StepProgram, config: ModelConfig, params: Params) -> int:
    """Return the bytes that must come from HBM: weights, and what each layer's attention reads.

    An extend is counted for one sequence at full context, and without sampling unless it scores.
    """
    if isinstance(program, DecodeBucket):
        rows, new, num_layers, head = program.rows, 1, config.num_layers, [params.embed_VD]
    elif program.scores:
        rows, new, num_layers = 1, program.bucket.tokens, config.num_layers
        head = [params.embed_VD]
    else:
        rows, new, num_layers, head = 1, program.bucket.tokens, config.num_writing_layers, []
    num_bytes = 0
    for layer in config.layers[:num_layers]:
        full = program.table_size * PAGE_SIZE
        keys = full if layer.kind == "full" else min(full, config.window + new - 1)
        num_bytes += rows * keys * layer.num_kv_heads * layer.head_dim * 2 * 2  # K and V, 2 bytes
    return num_bytes + tree_bytes((params.layers[:num_layers], params.ple_model_proj, head))


def name_of(program: StepProgram) -> str:
    """Name a program as the options do."""
    if isinstance(program, DecodeBucket):
        return f"decode {program.rows}"
    return f"{'score' if program.scores else 'extend'} {program.bucket.tokens}"


def find_faults(
    hlo: Hlo, alias_bytes: int, donated_bytes: int, pools: set[int], limit_ms: float | None
) -> list[str]:
    """Say what `--check` refuses in a program; `pools` are the KV arrays' sizes in elements."""
    found = []
    if alias_bytes < donated_bytes:
        found.append(f"{alias_bytes} bytes are aliased, of {donated_bytes} of KV and state")
    if copies := hlo.pool_copies(pools):
        found.append(f"whole KV arrays are made by {', '.join(copies)}")
    if limit_ms is not None and (estimated_ms := hlo.cost(min).cycles_ms) > limit_ms:
        found.append(f"estimated {estimated_ms:.2f} ms, the limit is {limit_ms} ms")
    return found


class Report:
    """Compiles programs of one model and prints a row for each."""

    def __init__(
        self, config: ModelConfig, max_batch: int, context: int, limits_ms: Mapping[int, float]
    ) -> None:
        topology = topologies.get_topology_desc("v6e:1x1", "tpu", chips_per_host_bounds=(1, 1, 1))
        chip = SingleDeviceSharding(topology.devices[0])
        self._config = config
        self._limits_ms = limits_ms
        self._params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip),
            abstract_params(config, DTYPE),
        )
        mix = PageMix.of_model(
            config,
            DTYPE,
            max_batch=max_batch,
            chunk_tokens=extend_buckets(context, is_accelerator=True)[-1].tokens,
            tokens_per_point=TOKENS_PER_RESUME_POINT,
        )
        num_pages = mix.num_pages(int(RESIDENT_BYTES) - tree_bytes(self._params))
        self._plan = make_plan(
            dtype=DTYPE,
            num_pages=num_pages,
            num_sliding_pages=mix.num_sliding_pages(num_pages),
            max_batch=max_batch,
            max_model_len=context,
            is_accelerator=True,
        )
        lower = lowerings(self._plan, config, self._params)
        self.programs = {
            name_of(program): (program, lower[program])
            for program in step_programs(self._plan)
            if program.table_size == self._plan.table_sizes[-1]
        }

    def compile(self, name: str) -> list[str]:
        """Compile a program, print its row, and return its faults."""
        program, lower = self.programs[name]
        start_s = time.perf_counter()
        compiled = lower().compile()
        compile_s = time.perf_counter() - start_s
        memory, text = compiled.memory_analysis(), compiled.as_text()
        if memory is None or text is None:
            raise InvariantError("this compiler tells nothing of its programs")
        hlo = Hlo(text)
        config = self._config
        count: dict[AttentionKind, int] = {
            "full": self._plan.num_pages,
            "sliding": self._plan.num_sliding_pages,
        }
        owners = [config.layers[i] for i in config.kv_owners]
        pools = {count[o.kind] * PAGE_SIZE * o.num_kv_heads * o.head_dim for o in owners}
        kv_bytes = sum(n * kv_bytes_per_page(config, DTYPE, kind) for kind, n in count.items())
        sizes = (
            tree_bytes(self._params),
            kv_bytes,
            memory.temp_size_in_bytes,
            memory.alias_size_in_bytes,
        )
        floor_ms = floor_bytes(program, config, self._params) / HBM_BYTES_PER_S * 1e3
        times = (*hlo.cost(min), floor_ms, sum(hlo.cost(max)))
        num_sorts = sum(step.opcode == "sort" for step in hlo.steps())
        cells = [name, *(f"{n / 1e9:.3f}" for n in sizes), f"{compile_s:.0f}"]
        cells += [*(f"{ms:.2f}" for ms in times), str(num_sorts)]
        print("|", " | ".join(cells), "|", flush=True)
        limit_ms = self._limits_ms.get(program.rows) if isinstance(program, DecodeBucket) else None
        state = jax.eval_shape(partial(make_state, self._plan.num_slots, config.vocab_size))
        donated_bytes = kv_bytes + tree_bytes(state)
        faults = find_faults(hlo, memory.alias_size_in_bytes, donated_bytes, pools, limit_ms)
        return [f"{name}: {fault}" for fault in faults]


def main() -> int:
    """Print the table; return 1 where `--check` finds fault."""
    parser = argparse.ArgumentParser(description="Estimate the step programs on one TPU v6e.")
    parser.add_argument("--model", choices=SIZES, default="e2b")
    parser.add_argument("--batch", default="1,8,32", help="rows of decodes, powers of two")
    parser.add_argument("--extend", default="256,2048", help="tokens of extends; may be empty")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--check", action="store_true", help="exit 1 where something is wrong")
    args = parser.parse_args()
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    jax.config.update("jax_platforms", "cpu")

    rows = [int(n) for n in args.batch.split(",")]
    limits_ms = DECODE_LIMIT_MS if (args.model, args.context) == ("e2b", 8192) else {}
    report = Report(model_config(args.model), max(rows), args.context, limits_ms)
    names = [f"decode {n}" for n in rows] + [f"extend {n}" for n in args.extend.split(",") if n]
    if unknown := set(names) - set(report.programs):
        parser.error(f"not among {', '.join(report.programs)}: {', '.join(unknown)}")
    print(f"{args.model} on one v6e, context {args.context}; GB, and estimated ms\n")
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    with ThreadPoolExecutor(MAX_COMPILES) as pool:
        faults = [fault for found in pool.map(report.compile, names) for fault in found]
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    return int(args.check and bool(faults))


if __name__ == "__main__":
    sys.exit(main())
