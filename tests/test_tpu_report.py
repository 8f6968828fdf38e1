"""The reading of optimised HLO on snippets of what the TPU compiler printed, shortened by hand.

The compiler itself runs only where libtpu is installed (extra `tpu`): test_compiles_for_v6e is
skipped elsewhere, a default test run has no need of the extra.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.device.buckets import DecodeBucket
from jaxserve.models.specs import abstract_params
from scripts.tpu_report import Hlo, find_faults, floor_bytes, model_config, parse_instruction

ROOT = Path(__file__).parent.parent
POOLS = {2049 * 32 * 256}


def step(text: str, cycles: int | None = None) -> str:
    """Write an instruction, with the compiler's estimate if it has one."""
    config = f'"estimated_cycles":"{cycles}",' if cycles is not None else ""
    return f'  {text}, backend_config={{"flag_configs":[],{config}"is_mask":false}}'


def module(*entry: str, others: str = "") -> Hlo:
    return Hlo(
        "HloModule jit_decode, is_scheduled=true\n\n"
        f"{others}\n"
        "ENTRY %main.1 (a.1: bf16[2049,32,256], b.1: s32[8]) -> (s32[8]) {\n"
        + "\n".join(entry)
        + "\n}\n"
    )


SCATTER = """\
%fused_computation.1 (param_0.1: bf16[2049,32,256], param_1.1: bf16[8,256]) -> bf16[2049,32,256] {
  %param_0.1 = bf16[2049,32,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1.1 = bf16[8,256]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %scatter.1 = bf16[2049,32,256]{2,1,0:T(8,128)(2,1)} scatter(%param_0.1, %param_1.1)
}
"""
CALL_SCATTER = (
    "%scatter_fusion.1 = bf16[2049,32,256]{2,1,0:T(8,128)(2,1)} fusion(%a.1, %b.1), kind=kCustom, "
    'calls=%fused_computation.1, metadata={op_name="jit(decode)/layer_0/attention/scatter"}'
)


def test_shapes_say_elements_bytes_and_memory() -> None:
    line = (
        "  %f.1 = (f32[8,8]{1,0:T(8,128)S(1)}, /*index=1*/bf16[3,2]{1,0:T(8,128)(2,1)}) "
        "fusion(%x.1), kind=kOutput, calls=%fused_computation.9"
    )
    instruction = parse_instruction(line)
    assert instruction is not None
    assert instruction.opcode == "fusion"
    assert instruction.results == ((64, 256, True), (6, 12, False))
    assert instruction.called == ("fused_computation.9",)


@pytest.mark.parametrize("line", ["", "}", "HloModule jit_decode, is_scheduled=true"])
def test_other_lines_are_no_instructions(line: str) -> None:
    assert parse_instruction(line) is None


def test_estimates_of_the_entry_are_added() -> None:
    hlo = module(
        step("%copy.1 = f32[8]{0:T(128)} copy(%c.1)", 1_750_000),
        step("ROOT %add.1 = f32[8]{0:T(128)} add(%copy.1, %copy.1)", 3_500_000),
    )
    assert hlo.cost(min) == pytest.approx((3.0, 0.0))


def gather(layout: str) -> str:
    return step(
        f"%gather_fusion.1 = bf16[2048,32,512]{{{layout}}} fusion(%a.1, %b.1), kind=kCustom, "
        'calls=%fused_computation.2, metadata={op_name="jit(decode)/layer_4/attention/gather"}'
    )


@pytest.mark.parametrize(("layout", "moves"), [("2,1,0:T(8,128)(2,1)", 2), ("2,1,0:S(1)", 1)])
def test_a_gather_is_counted_by_its_bytes(layout: str, moves: int) -> None:
    expected_ms = moves * 2048 * 32 * 512 * 2 / 1.417e12 * 1e3
    assert module(gather(layout)).cost(min) == pytest.approx((0.0, expected_ms))


BRANCHES = "\n".join(
    [
        "%idle.1 (t.1: (s32[8])) -> s32[8] {",
        step("ROOT %copy.8 = s32[8]{0:T(128)} copy(%t.1)", 1_750),
        "}",
        "%busy.1 (t.2: (s32[8])) -> s32[8] {",
        step("ROOT %while.1 = s32[8]{0} while(%t.2), condition=%cond.1, body=%body.1"),
        "}",
        "%cond.1 (t.3: (s32[8])) -> pred[] {",
        "  %constant.1 = s32[]{:T(128)} constant(30)",
        "  ROOT %lt.1 = pred[]{:T(512)} compare(%t.3, %constant.1), direction=LT",
        "}",
        "%body.1 (t.4: (s32[8])) -> (s32[8]) {",
        step("ROOT %add.9 = s32[8]{0:T(128)} add(%t.4, %t.4)", 1_750_000),
        "}",
    ]
)
CONDITIONAL = step(
    "ROOT %cond.2 = s32[8]{0:T(128)} conditional(%p.1, %t.1, %t.2), "
    "branch_computations={%idle.1, %busy.1}"
)


def test_a_conditional_costs_one_branch_and_a_counted_loop_its_trips() -> None:
    hlo = module(CONDITIONAL, others=BRANCHES)
    assert hlo.cost(min).cycles_ms == pytest.approx(0.001)
    assert hlo.cost(max).cycles_ms == pytest.approx(30.0)


def test_a_loop_that_data_bounds_is_counted_once() -> None:
    hlo = module(CONDITIONAL, others=BRANCHES.replace("constant(30)", "get-tuple-element(%t.3)"))
    assert hlo.cost(max).cycles_ms == pytest.approx(1.0)


def test_branches_are_among_the_steps() -> None:
    opcodes = [i.opcode for i in module(CONDITIONAL, others=BRANCHES).steps()]
    assert sorted(opcodes) == ["add", "compare", "conditional", "constant", "copy", "while"]


def test_a_scatter_into_a_pool_is_no_copy() -> None:
    assert module(step(CALL_SCATTER), others=SCATTER).pool_copies(POOLS) == []


def test_a_scatter_into_a_converted_pool_is_a_copy() -> None:
    others = SCATTER.replace(
        "parameter(0)", "parameter(0)\n  %c.1 = f32[2049,32,256]{2} convert(%x)"
    )
    assert module(step(CALL_SCATTER), others=others).pool_copies(POOLS) == ["fusion"]


@pytest.mark.parametrize("opcode", ["copy", "copy-start", "transpose", "bitcast-convert"])
def test_an_op_that_makes_a_pool_is_a_copy(opcode: str) -> None:
    made = step(f"%c.1 = (u16[2049,32,256]{{2,1,0}}, u32[]{{:S(2)}}) {opcode}(%a.1)")
    assert module(made).pool_copies(POOLS) == [opcode]


def test_a_copy_in_a_branch_is_found() -> None:
    others = BRANCHES.replace("s32[8]{0:T(128)} copy", "bf16[2049,32,256]{2,1,0} copy")
    assert module(CONDITIONAL, others=others).pool_copies(POOLS) == ["copy"]


def test_faults_name_what_is_wrong() -> None:
    hlo = module(step("%copy.1 = bf16[2049,32,256]{2,1,0} copy(%a.1)", 17_500_000))
    faults = find_faults(hlo, alias_bytes=5, donated_bytes=6, pools=POOLS, limit_ms=5.0)
    assert faults == [
        "5 bytes are aliased, of 6 of KV and state",
        "whole KV arrays are made by copy",
        "estimated 10.00 ms, the limit is 5.0 ms",
    ]


def test_a_sound_program_has_no_faults() -> None:
    hlo = module(step(CALL_SCATTER), others=SCATTER)
    assert find_faults(hlo, alias_bytes=6, donated_bytes=6, pools=POOLS, limit_ms=5.0) == []


def test_the_floor_of_a_decode_is_its_weights_and_all_layers_reads() -> None:
    config = model_config("e2b")
    params = abstract_params(config, "bfloat16")
    floor = floor_bytes(DecodeBucket(rows=8, table_size=256), config, params)
    weights = 2 * (402_653_184 + 278_396_928 + 1_557_135_360 + 27_525_120 + 13_762_560)
    assert floor == weights + 8 * (28 * 512 * 1024 + 7 * 8192 * 2048)


@pytest.mark.parametrize(("name", "full_kib", "sliding_kib"), [("e2b", 6, 12), ("e4b", 16, 40)])
def test_sizes_store_the_known_bytes_per_token(name: str, full_kib: int, sliding_kib: int) -> None:
    config = model_config(name)
    assert config.kv_values_per_token("full") * 2 == full_kib * 1024
    assert config.kv_values_per_token("sliding") * 2 == sliding_kib * 1024


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra `tpu`")
@pytest.mark.timeout(900)
def test_compiles_for_v6e() -> None:
    # A process of its own: libtpu is loaded once and takes a lock.
    done = subprocess.run(
        [sys.executable, "scripts/tpu_report.py", "--batch", "8", "--extend", "", "--check"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| decode 8 |" in done.stdout
