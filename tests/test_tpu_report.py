"""The reading of optimised HLO on snippets of what the TPU compiler printed, shortened by hand.

The compiler itself is asked by `.ci/run`; tests have no need of the extra `tpu`.
"""

import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.device.buckets import DecodeBucket, ExtendBucket
from jaxserve.device.programs import ExtendShape
from jaxserve.models.kv_cache import KVDtype
from jaxserve.models.specs import Use, abstract_params
from scripts.tpu_hlo import Cost, Hlo, Kernel, kernel_of, parse_instruction
from scripts.tpu_kernels import estimate_ms, read_bundles
from scripts.tpu_report import find_faults, limit_line, model_config, read_limits
from scripts.tpu_steps import Estimate, floor_ms

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
    assert hlo.cost(min) == pytest.approx((3.0, 0.0, 0.0))


def gather(layout: str) -> str:
    return step(
        f"%gather_fusion.1 = bf16[2048,32,512]{{{layout}}} fusion(%a.1, %b.1), kind=kCustom, "
        'calls=%fused_computation.2, metadata={op_name="jit(decode)/layer_4/attention/gather"}'
    )


@pytest.mark.parametrize(("layout", "moves"), [("2,1,0:T(8,128)(2,1)", 2), ("2,1,0:S(1)", 1)])
def test_a_gather_is_counted_by_its_bytes(layout: str, moves: int) -> None:
    expected_ms = moves * 2048 * 32 * 512 * 2 / 1.417e12 * 1e3
    assert module(gather(layout)).cost(min) == pytest.approx((0.0, expected_ms, 0.0))


KERNEL = Kernel(
    "int4_matmul", ((8, 1536), (192, 2048), (48, 2048)), 1_859_584, ("bf16", "s32", "bf16")
)
CALL_KERNEL = (
    "  ROOT %int4_matmul.1 = f32[8,2048]{1,0:T(8,128)} custom-call(%x.1, %words.1, %steps.1), "
    'custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[8,1536]{1,0}, '
    "s32[192,2048]{1,0}, bf16[48,2048]{1,0}}, frontend_attributes={kernel_metadata={}}, "
    'metadata={op_name="jit(decode)/layer_0/jit(int4_matmul_kernel)/int4_matmul/pallas_call"}, '
    'backend_config={"flag_configs":[],"custom_call_config":{"body":"TUz","cost_estimate":'
    '{"flops":"50331648","transcendentals":"0","bytes_accessed":"1859584"}}}'
)


def test_a_kernel_takes_what_is_said_of_it() -> None:
    hlo = module(CALL_KERNEL)
    assert hlo.kernels() == [KERNEL]
    hlo.kernel_ms = {KERNEL: 0.5}
    assert hlo.cost(min) == pytest.approx((0.0, 0.0, 0.5))


def test_other_custom_calls_are_no_kernels() -> None:
    instruction = parse_instruction(CALL_KERNEL.replace("tpu_custom_call", "TopK"))
    assert instruction is not None
    assert kernel_of(instruction) is None


BUNDLES = """\
control target key start
LH: loop header
    = control target key end
   0x4   :  { %8 = vsyncpa [#allocation3], 0 } /* Start region 1 */
  0x10 LB: > { %s1 = sphi 0  ;;  %p58_p0 = scmp.eq.s32.totalorder %s2294_s25, 0 }
  0x73 PF: > { %v369_v1 = vlaneseq  ;;  %246 = dma.hbm_to_vmem [thread:$0]  (!%p2447_p3), /*
base_bounds: (1, 192)
iteration_bounds: (1, 48, 3)
strides: (1, 4)
 */ }
 0x15d   : > { %21 = sbr.rel (!%p3336_p5) target = $region105 } /* End region 3 */
 0x161   :  {} /* End region 4 :: End region 104 */
"""


def test_bundles_of_the_grids_loop_are_counted() -> None:
    assert read_bundles(BUNDLES) == (144, 144 * 3)


@pytest.mark.parametrize(
    ("skipped", "runs"),
    [
        ("  0x80   : > { %1 = vst 0 }\n" * 100, 48),  # once for each of 48 · 1 innermost loops
        ("  0x80   : > { %1 = vst 0 }\n" * 10, 144),
        ("  0x80   : > { %1 = vmatmul.mubr.bf16 0 }\n" * 100, 144),
    ],
)
def test_what_a_branch_skips_runs_once_in_an_innermost_loop(skipped: str, runs: int) -> None:
    branch = "  0x7f   : > { %2 = sbr.rel (%p1) target = $region60 }\n"
    end = "  0x90 PF: > { %3 = vnop } /* Start/End empty region 60 :: Start region 61 */\n"
    text = BUNDLES.replace("  0x73 PF", branch + skipped + end + "  0x73 PF")
    assert read_bundles(text) == (144, 144 * 5 + runs * skipped.count("\n"))


def test_a_kernel_that_multiplies_nothing_has_another_usual_operation() -> None:
    branch = "  0x7f   : > { %2 = sbr.rel (%p1) target = $region60 }\n"
    end = "  0x90 PF: > { %3 = vnop } /* Start/End empty region 60 :: Start region 61 */\n"
    skipped = "  0x80   : > { %1 = vrsqrt.f32 0 }\n" * 100
    text = BUNDLES.replace("  0x73 PF", branch + skipped + end + "  0x73 PF")
    assert read_bundles(text, usual="vrsqrt") == (144, 144 * 105)


def test_a_grid_of_one_step_is_no_loop() -> None:
    assert read_bundles(BUNDLES.replace(": > {", ":  {")) == (1, 5)


def test_a_loop_within_the_grid_makes_its_trips() -> None:
    text = BUNDLES.replace("PF: > {", "PF: >> {")
    inner = text.count(": >> {")
    assert read_bundles(text, trips=10) == (1440, 144 * (3 - inner + 10 * inner))


def test_a_loop_within_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="trips are not told"):
        read_bundles(BUNDLES.replace("PF: > {", "PF: >> {"))


def test_a_kernel_waits_for_its_first_blocks_then_for_the_slower_of_both() -> None:
    # 1.417 MB take a microsecond, 1,750 bundles do too.
    kernel = Kernel("k", (), 1_417_000)
    assert estimate_ms(kernel, num_steps=10, bundles=3500) == pytest.approx(2e-3 + 0.1e-3)
    assert estimate_ms(kernel, num_steps=10, bundles=350) == pytest.approx(1e-3 + 0.1e-3)


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


SOUND = Estimate(
    weight_bytes=1,
    kv_bytes=5,
    donated_bytes=6,
    temp_bytes=1,
    alias_bytes=6,
    device_bytes=8,
    compile_s=1.0,
    least=Cost(1.0, 0.0, 0.0),
    most=Cost(1.0, 0.0, 0.0),
    floor_ms=1.0,
    kernels=Counter(),
    num_sorts=0,
    pool_copies=[],
)


def test_faults_name_what_is_wrong() -> None:
    made = replace(SOUND, alias_bytes=5, pool_copies=["copy", "convert"])
    measured = {"temp_gb": 0.25, "ratio": 1.75, "device_gb": 32.5}
    limits = {"device_gb": 32, "ratio": 1.5}
    assert find_faults(made, measured, limits) == [
        "5 bytes are aliased, of 6 of KV and state",
        "whole KV arrays are made by copy, convert",
        "device_gb 32.500 exceeds 32",
        "ratio 1.750 exceeds 1.5",
    ]


def test_a_sound_program_has_no_faults() -> None:
    assert find_faults(SOUND, {"ratio": 1.5}, {"ratio": 1.5}) == []


@pytest.mark.parametrize(("kv_dtype", "program"), [("bf16", "decode 8"), ("int8", "extend 256")])
def test_limits_are_found_by_the_options_as_printed(kv_dtype: str, program: str) -> None:
    """What CI asks has limits."""
    limits = read_limits(
        f"e2b, int4 weights, int4 table, {kv_dtype} KV, pallas attention, context 8192, 10 layers"
    )
    assert set(limits[program]) == {"temp_gb", "ratio"}
    assert read_limits("another model") == {}


def test_new_limits_are_a_line_of_the_file() -> None:
    line = limit_line("decode 8", {"temp_gb": 0.174, "ratio": 9.52})
    assert line == '"decode 8" = { temp_gb = 0.2, ratio = 11 }'
    assert tomllib.loads(line) == {"decode 8": {"temp_gb": 0.2, "ratio": 11}}


LINEARS = 278_396_928 + 1_557_135_360 + 27_525_120 + 13_762_560
KV_READ = 28 * 512 * 1024 + 7 * 8192 * 2048
KV_READ_INT8 = 28 * 512 * (512 + 8) + 7 * 8192 * (1024 + 8)


@pytest.mark.parametrize(
    ("int4_uses", "bits", "kv_dtype", "kv_read"),
    [((), 16, "bfloat16", KV_READ), (("linear",), 4.5, "int8", KV_READ_INT8)],
)
def test_the_floor_of_a_decode_is_its_weights_and_all_layers_reads(
    int4_uses: tuple[Use, ...], bits: float, kv_dtype: KVDtype, kv_read: int
) -> None:
    config = model_config("e2b")
    params = abstract_params(config, "bfloat16", int4_uses)
    num_bytes = 402_653_184 * 2 + LINEARS * bits / 8 + 8 * kv_read
    floor = floor_ms(DecodeBucket(rows=8, table_size=256), config, params, kv_dtype)
    assert floor == pytest.approx(num_bytes / 1.417e9)


def test_the_floor_of_a_long_extend_is_its_products() -> None:
    config = model_config("e2b", 10)
    params = abstract_params(config, "bfloat16", ["linear"])
    shape = ExtendShape(
        bucket=ExtendBucket(tokens=2048, block=128),
        num_sequences=8,
        table_size=256,
        chunk_pages=256,
    )
    # Of the five layers that write: attention (q, k, v, o), the MLP, the per-layer inputs.
    attention = 4 * 1536 * (2 * 2048 + 512) + 1536 * (2 * 4096 + 1024)
    weights = attention + 5 * 3 * 1536 * 6144 + 5 * 2 * 1536 * 256 + 10 * 256 * 1536
    assert floor_ms(shape, config, params, "bfloat16") == pytest.approx(2 * 2048 * weights / 918e9)


def test_a_part_of_a_model_shares_in_its_second_half() -> None:
    config = model_config("e2b", 10)
    assert [layer.kv_source for layer in config.layers] == [0, 1, 2, 3, 4, 3, 3, 3, 3, 4]
    assert config.layers[9].mlp_dim == 2 * config.layers[0].mlp_dim


@pytest.mark.parametrize(("name", "full_kib", "sliding_kib"), [("e2b", 6, 12), ("e4b", 16, 40)])
def test_sizes_store_the_known_bytes_per_token(name: str, full_kib: int, sliding_kib: int) -> None:
    config = model_config(name)
    assert config.kv_values_per_token("full") * 2 == full_kib * 1024
    assert config.kv_values_per_token("sliding") * 2 == sliding_kib * 1024
