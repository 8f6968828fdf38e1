"""A case of scripts/revalidate.py, and which of the server's programs, of what plan, it is."""

from dataclasses import dataclass, replace
from typing import Literal

import jax

from jaxserve.device.buckets import DecodeBucket
from jaxserve.device.plan import PAGE_SIZE, DevicePlan, make_plan, pages_for
from jaxserve.device.runner import StepProgram, empty_cache, empty_state, step_programs
from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.kv_cache import KVDtype
from jaxserve.models.specs import Use, abstract_params
from jaxserve.models.windows import Windows
from scripts.tpu_report import SIZES, model_config
from scripts.tpu_steps import tree_bytes

SLOTS = 8
"""Of an extend's plan: it takes in so many sequences at once, at most."""

LEAST_PAGES = 8192
"""Of each kind, on a chip: pools that fit its VMEM would be moved there, which no server's are."""

Mode = Literal["measure", "estimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured.

    Attributes:
        size: rows of a decode, tokens of an extend.
        context: positions of each row: what the step's last token attends to.
        donates: whether a step updates cache and state in place, as the server's do.
        is_probe: whether to say only if it fits.
        rows: of a probe: so many have pages of their full context, and are what a decode decodes;
            beside them an extend takes in one more.
        limit_bytes: of the device; None: what it has.
    """

    program: Literal["decode", "extend"]
    size: int
    context: int
    model: str = "e2b"
    weights: Literal["bf16", "int4"] = "int4"
    ple_dtype: Literal["bf16", "int4"] = "int4"
    kv_dtype: Literal["bf16", "int8"] = "int8"
    donates: bool = True
    is_probe: bool = False
    rows: int = 0
    limit_bytes: int | None = None

    @property
    def resident(self) -> int:
        """Rows whose pages are in use; an extend takes in the last of them."""
        num_decoding = self.rows if self.is_probe else 0
        if self.program == "extend":
            return num_decoding + 1
        return num_decoding or self.size


def config_of(model: str) -> ModelConfig:
    """Describe a model; "small" is one whose every step is quick on a CPU."""
    if model in SIZES:
        return model_config(model)
    config = model_config("e2b", 10)

    def layer(i: int, source: int) -> LayerConfig:
        big = config.layers[i]
        rope = replace(big.rope, num_pairs=big.rope.num_pairs // 8)
        return replace(
            big, head_dim=big.head_dim // 8, mlp_dim=256, kv_source=source, rope=rope, num_heads=4
        )

    layers = (layer(0, 0), layer(4, 1), layer(5, 0), layer(9, 1))
    return replace(
        config,
        layers=layers,
        model_dim=128,
        vocab_size=2048,
        ple_vocab_size=2048,
        ple_dim=128,
        window=64,
    )


def plan_of(case: Case, config: ModelConfig, *, is_accelerator: bool) -> DevicePlan:
    """Return a plan whose programs hold the case's, with pools for what the case is about."""
    windows = Windows(page_size=PAGE_SIZE, window=config.window)
    least = LEAST_PAGES if is_accelerator and not case.is_probe else 0
    num_new = case.size if case.program == "extend" else 1
    num_sliding = case.resident * windows.row_pages + pages_for(num_new)
    kv_dtype: KVDtype = "int8" if case.kv_dtype == "int8" else "bfloat16"
    return make_plan(
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        num_pages=1 + max(case.resident * pages_for(case.context), least),
        num_sliding_pages=1 + max(num_sliding, least),
        max_batch=max(case.resident, SLOTS if case.program == "extend" else 1),
        max_model_len=case.context,
        is_accelerator=is_accelerator,
        attention="pallas" if is_accelerator else "xla",
    )


def program_of(case: Case, plan: DevicePlan) -> StepProgram:
    """Find the case's program among the plan's."""
    for program in step_programs(plan):
        if program.table_size != plan.table_sizes[-1]:
            continue
        if isinstance(program, DecodeBucket):
            if case.program == "decode" and program.rows == plan.num_slots:
                return program
        elif case.program == "extend" and program.bucket.tokens == case.size and not program.scores:
            return program
    raise ValueError(f"no {case.program} of {case.size} in a context of {case.context}")


def int4_uses(case: Case) -> set[Use]:
    linear: set[Use] = {"linear"} if case.weights == "int4" else set()
    table: set[Use] = {"ple_table"} if case.ple_dtype == "int4" else set()
    return linear | table


def argument_bytes(case: Case) -> int:
    """Return the bytes of weights, cache and state, by their shapes."""
    config = config_of(case.model)
    plan = plan_of(case, config, is_accelerator=case.model != "small")
    shapes = jax.eval_shape(lambda: (empty_cache(plan, config), empty_state(plan, config)))
    return tree_bytes(abstract_params(config, "bfloat16", int4_uses(case))) + tree_bytes(shapes)
