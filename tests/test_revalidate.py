"""scripts/revalidate.py: its searches on devices that are numbers, its processes, its file."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import pytest

from jaxserve.device.state import state_num_bytes
from jaxserve.device.targets import Target, find_target
from jaxserve.errors import ConfigError
from jaxserve.models.kv_cache import bytes_per_page
from jaxserve.models.specs import abstract_params
from jaxserve.models.windows import Windows
from scripts import revalidate, revalidate_one
from scripts.revalidate import (
    MAX_GUESSES,
    SMALL_BYTES,
    Revalidation,
    bisect,
    capacities,
    cases,
    most_rows,
    name_of,
    with_rows,
)
from scripts.revalidate_case import (
    Case,
    argument_bytes,
    config_of,
    int4_uses,
    plan_of,
    program_of,
)
from scripts.revalidate_one import SAMPLES, describe_device, is_full
from scripts.revalidate_process import Answer, ask_process
from scripts.revalidate_record import Record
from scripts.tpu_steps import tree_bytes

GIB = 1 << 30
MEASURED = {"median_ms": 2.0, "iqr_ms": [1.9, 2.2], "samples_ms": [2.0] * SAMPLES}
DECODE = Case(program="decode", size=1, context=8192, is_probe=True)
EXTEND = replace(DECODE, program="extend", size=2048)
CHIP = {"platform": "tpu", "kind": "fake", "limit_bytes": 10 * GIB}


@pytest.mark.parametrize("high", [0, 1, 2, 3, 37, 64, 1000])
def test_bisection_finds_the_most_in_as_many_questions_as_bits(high: int) -> None:
    for most in {0, 1, high // 3, high - 1, high, high + 5} - {-1}:
        asked: list[int] = []

        def fits(n: int, most: int = most, asked: list[int] = asked) -> bool:
            asked.append(n)
            return n <= most

        assert bisect(fits, high, lambda: None) == min(most, high)
        assert len(asked) <= high.bit_length()
        assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("most", [0, 1, 400, 999, 1000])
@pytest.mark.parametrize("guessed", [0, 1, 399, 401, 1000, 5000])
def test_whatever_is_guessed_the_border_is_found(most: int, guessed: int) -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= most

    assert bisect(fits, 1000, lambda: guessed) == most
    assert len(asked) <= MAX_GUESSES + (1000).bit_length()
    if most in (guessed, guessed - 1):
        assert len(asked) <= 2


class Device:
    """A device with 10 GiB, whose programs need some temp beside the bytes that shapes tell."""

    def __init__(self, temp_bytes: Callable[[int], int] = lambda rows: GIB) -> None:
        self.asked: list[Case] = []
        self._temp_bytes = temp_bytes

    def __call__(self, case: Case) -> Answer:
        self.asked.append(case)
        if not case.is_probe:
            return MEASURED
        device_bytes = argument_bytes(case) + self._temp_bytes(case.rows)
        if device_bytes > 10 * GIB:
            return {"fits": False, "error": "RESOURCE_EXHAUSTED"}
        return {"fits": True, "device_bytes": device_bytes, "weight_bytes": 3 * GIB}

    def assert_border(self, case: Case, rows: int) -> None:
        """Check that rows are the most that fit."""
        assert rows == 0 or self(with_rows(case, rows))["fits"]
        assert not self(with_rows(case, rows + 1))["fits"]


def run_of(out: Path, ask: Callable[[Case], Answer]) -> Revalidation:
    return Revalidation(Record(out, "measure", CHIP), ask, 10 * GIB)


def test_capacities_are_of_rows_that_stay_and_of_one_more_that_comes(tmp_path: Path) -> None:
    device, out = Device(), tmp_path / "results.json"
    run = run_of(out, device)
    run.run(DECODE)
    run.run(EXTEND)

    # All rows decode together; an extend keeps its chunk's size.
    assert all(case.size in (case.rows, 2048) and case.is_probe for case in device.asked)
    found = json.loads(out.read_text())["capacity"]
    assert [entry["question"] for entry in found] == [
        "capacity, decode residency, context 8192, int8 KV",
        "capacity, prefill admission, context 8192, int8 KV",
    ]
    for entry in found:
        device.assert_border(Case(**entry["case"]), entry["rows"])
        assert entry["tokens"] == entry["rows"] * 8192
        # What the answer rests on: so many rows fit, and one more does not.
        assert [entry["rows"], True] in entry["asked"]
        assert [entry["rows"] + 1, False] in entry["asked"]
        assert len(entry["asked"]) <= 5
    assert found[1]["rows"] < found[0]["rows"]


@pytest.mark.parametrize(
    "temp_bytes",
    [
        lambda rows: GIB // 10 * (rows // 32),  # by buckets
        lambda rows: GIB // 10_000 * rows * rows,
        lambda rows: 0,  # all fit that pages do
        lambda rows: 9 * GIB,  # none do
    ],
)
def test_bytes_that_no_line_predicts_cost_questions_only(
    tmp_path: Path, temp_bytes: Callable[[int], int]
) -> None:
    device, out = Device(temp_bytes), tmp_path / "results.json"
    run_of(out, device).run(DECODE)

    assert len(device.asked) <= MAX_GUESSES + most_rows(DECODE, 10 * GIB).bit_length()
    (found,) = json.loads(out.read_text())["capacity"]
    device.assert_border(DECODE, found["rows"])


@pytest.mark.parametrize("case", list(capacities("small", SMALL_BYTES)), ids=name_of)
def test_capacities_are_what_the_bytes_of_shapes_predict(tmp_path: Path, case: Case) -> None:
    config = config_of("small")
    window_pages = Windows(page_size=32, window=64).row_pages

    def ask(probe: Case) -> Answer:
        # By hand: weights, then the pages of both kinds and the slots of so many rows.
        weight_bytes = tree_bytes(abstract_params(config, "bfloat16", int4_uses(probe)))
        stored = "int8" if probe.kv_dtype == "int8" else "bfloat16"
        extra, chunk = (1, 256 // 32) if probe.program == "extend" else (0, 1)
        rows = probe.rows + extra
        num_sliding = 1 + rows * window_pages + chunk
        device_bytes = (
            weight_bytes
            + (1 + rows * 256 // 32) * bytes_per_page(config, "full", 32, stored)
            + num_sliding * bytes_per_page(config, "sliding", 32, stored)
            + state_num_bytes(max(rows, 8) if extra else rows, config.vocab_size)
        )
        fits = device_bytes <= SMALL_BYTES
        return {"fits": fits, "device_bytes": device_bytes, "weight_bytes": weight_bytes}

    out = tmp_path / "results.json"
    Revalidation(Record(out, "measure", CHIP), ask, SMALL_BYTES).run(case)

    (found,) = json.loads(out.read_text())["capacity"]
    first_that_does_not = next(n for n in count(1) if not ask(with_rows(case, n))["fits"])
    assert found["rows"] == first_that_does_not - 1 > 0
    assert len(found["asked"]) <= 4


def test_a_probe_that_fails_for_another_reason_ends_its_search_only(tmp_path: Path) -> None:
    run = run_of(tmp_path / "results.json", lambda case: {"error": "the process ended with 1"})
    assert run.run(DECODE).endswith(" rows: the process ended with 1")
    assert run.run(EXTEND).endswith(" rows: the process ended with 1")
    assert run.num_faults == 2


@pytest.mark.parametrize("model", ["small", "e2b"])
def test_every_case_has_a_program_and_a_name_of_its_own(model: str) -> None:
    found = list(cases(model))
    names = [name_of(case) for case in [*found, *capacities(model, None)]]
    assert len(set(names)) == len(names)
    assert {case.donates for case in found} == {True, False}
    config = config_of(model)
    for case in found:
        for is_accelerator in (model == "e2b", True):
            plan = plan_of(case, config, is_accelerator=is_accelerator)
            program_of(case, plan)
        assert len(int4_uses(case)) == (case.weights == "int4") + (case.ple_dtype == "int4")


@pytest.mark.timeout(300)
def test_a_case_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    case = Case(program="decode", size=2, context=64, model="small")
    result = ask_process("measure", case, 300)

    assert len(result["samples_ms"]) == SAMPLES
    low_ms, high_ms = result["iqr_ms"]
    assert 0 < low_ms <= result["median_ms"] <= high_ms
    # Cache and state are updated in place.
    assert result["alias_bytes"] > result["kv_bytes"] > 0


def test_the_process_that_asks_opens_no_device() -> None:
    code = (
        "from scripts.revalidate import capacities, cases, most_rows, name_of\n"
        "print(most_rows(next(capacities('e2b', None)), 1 << 34), *map(name_of, cases('e2b')))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_chip"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def fake_process(code: str, limit_s: float = 60.0) -> Answer:
    return ask_process("measure", None, limit_s, (sys.executable, "-c", code))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "import sys; print('{}'); sys.exit('The TPU is in use by process 7')",
            "the process ended with 1: The TPU is in use by process 7",
        ),
        ("import os; os._exit(3)", "the process ended with 3"),
        ("import os; os.kill(os.getpid(), 9)", "the process was killed, as the system does"),
        ("import os; os.kill(os.getpid(), 11)", "the process was ended by SIGSEGV"),
        ("print('no JSON')", "the process ended without an answer"),
        ("", "the process ended without an answer"),
        ("print('[]')", "the process ended without an answer"),
    ],
)
def test_a_process_that_dies_is_an_answer(code: str, error: str) -> None:
    assert fake_process(code)["error"].startswith(error)


def has_ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # pytest's limit ends it
        time.sleep(0.02)


SLEEPER = """
import subprocess
process = subprocess.Popen(["sleep", "600"])
open({!r}, "w").write(str(process.pid))
process.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    answer = fake_process(SLEEPER.format(str(pid_file)), limit_s=1.0)
    assert answer == {"error": "no answer after 1 s"}
    if pid_file.exists():  # it had come so far
        wait_until(lambda: has_ended(int(pid_file.read_text())))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    pid_file = tmp_path / "pid"
    command = (sys.executable, "-c", SLEEPER.format(str(pid_file)))
    code = (
        "from pathlib import Path\n"
        "from scripts.revalidate import stop_on_signals\n"
        "from scripts.revalidate_process import ask_process\n"
        "stop_on_signals(Path('results.json'))\n"
        f"ask_process('measure', None, 600, {command!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()))
    process.send_signal(number)
    _, told = process.communicate()
    assert process.returncode == 128 + number
    assert "stopped; the same command goes on with results.json" in told
    wait_until(lambda: has_ended(int(pid_file.read_text())))


def test_results_are_kept_as_they_come(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    run = run_of(out, Device())
    texts = [run.run(case) for case in list(cases("e2b"))[:2]]

    results = json.loads(out.read_text())["results"]
    assert [result["case"]["size"] for result in results] == [1, 8]
    assert texts == ["2.000 ms (IQR 1.900 to 2.200)"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_run_goes_on_where_another_was_stopped(tmp_path: Path) -> None:
    out, device = tmp_path / "results.json", Device()
    first, second = list(cases("e2b"))[:2]
    run_of(out, device).run(first)
    run_of(out, lambda case: {"error": "the process ended with 1"}).run(second)

    class Stopped(Exception):
        pass

    def stop_in_a_search(case: Case) -> Answer:
        if len(device.asked) == 3:
            raise Stopped
        return device(case)

    with pytest.raises(Stopped):
        run_of(out, stop_in_a_search).run(DECODE)

    resumed = Device()
    assert len(Record(out, "measure", CHIP)) == 3
    run = run_of(out, resumed)
    for case in (first, second, DECODE):
        run.run(case)
    # What failed is asked again; what was answered, in the search too, is not.
    assert resumed.asked[0] == second
    assert not {*device.asked} & {*resumed.asked}
    body = json.loads(out.read_text())
    assert [result["median_ms"] for result in body["results"]] == [2.0, 2.0]
    device.assert_border(DECODE, body["capacity"][0]["rows"])
    assert len(body["probes"]) == len(body["capacity"][0]["asked"])


def test_results_of_another_device_or_code_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    Record(out, "measure", CHIP)
    with pytest.raises(SystemExit, match="is of kind 'fake', not 'other': delete it, or name"):
        Record(out, "measure", {**CHIP, "kind": "other"})
    with pytest.raises(SystemExit, match="is of 'measure', not 'estimate'"):
        Record(out, "estimate", CHIP)


@pytest.mark.parametrize("text", ["", "[]", '{"mode": "measure"}', "# notes"])
def test_another_file_is_not_overwritten(tmp_path: Path, text: str) -> None:
    out = tmp_path / "results.json"
    out.write_text(text)
    with pytest.raises(SystemExit, match="is there and "):
        Record(out, "measure", CHIP)
    assert out.read_text() == text


def test_a_file_that_cannot_be_written_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--out .*nowhere/results\.json cannot be written: "):
        Record(tmp_path / "nowhere" / "results.json", "measure", CHIP)


def run_main(monkeypatch: pytest.MonkeyPatch, device: Answer, *arguments: str) -> int:
    """Run the script where processes are faked: those of bfloat16 KV fail."""

    def ask(mode: str, case: Case | None, limit_s: float) -> Answer:
        if case is None:
            return device
        return Device()(case) if case.kv_dtype == "int8" else {"error": "the process ended with 1"}

    monkeypatch.setattr(revalidate, "ask_process", ask)
    monkeypatch.setattr(revalidate, "stop_on_signals", lambda out: None)
    monkeypatch.setattr(sys, "argv", ["revalidate.py", *arguments])
    return revalidate.main()


def test_all_asks_everything_and_tells_of_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    assert run_main(monkeypatch, CHIP, "--all", "--out", str(out)) == 1
    body = json.loads(out.read_text())
    assert [Case(**result["case"]) for result in body["results"]] == list(cases("e2b"))
    assert [c["question"] for c in body["capacity"]] == [*map(name_of, capacities("e2b", None))]
    told = capsys.readouterr()
    assert "28 of 28: capacity, prefill admission, context 8192, bf16 KV" in told.out
    assert "have no answer; the same command asks them again" in told.err
    # Measured on a chip, the limit is what the chip refuses.
    assert {probe["case"]["limit_bytes"] for probe in body["probes"]} == {None}


def test_only_asks_what_has_a_text_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results.json"
    arguments = ("--only", "int8 KV, copying", "--out", str(out), "--limit-bytes", "7")
    assert run_main(monkeypatch, CHIP, *arguments) == 0
    (result,) = json.loads(out.read_text())["results"]
    assert result["case"] == asdict(next(case for case in cases("e2b") if not case.donates))

    with pytest.raises(SystemExit, match="nothing has 'decoed' in its name:\ndecode, 1, context"):
        run_main(monkeypatch, CHIP, "--only", "decoed", "--out", str(out))


def test_a_device_that_does_not_answer_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results.json"
    with pytest.raises(SystemExit, match="no device answers: the process ended with 1: busy"):
        run_main(
            monkeypatch, {"error": "the process ended with 1: busy"}, "--all", "--out", str(out)
        )
    assert not out.exists()


def test_a_cpu_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cpu:
        platform, device_kind = "cpu", "cpu"

    target = Target(device=Cpu(), memory_bytes=1)
    monkeypatch.setattr(revalidate_one, "find_target", lambda: target)
    monkeypatch.setattr(revalidate_one, "why_no_tpu", lambda: "in use by process 7")
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(ConfigError, match=r"no accelerator was found \(in use by process 7\); JAX"):
        describe_device("measure")


def test_a_device_is_described_with_what_compiles_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    device = describe_device("measure")
    assert device["kind"] == find_target().device.device_kind
    assert {"limit_bytes", "version", "jax", "code", "XLA_FLAGS"} <= set(device)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("RESOURCE_EXHAUSTED: Error allocating device buffer: attempting to allocate 1G", True),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 33G of 31.25G", True),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating", False),
        ("INTERNAL: Mosaic failed to compile", False),
    ],
)
def test_only_a_full_device_is_one_that_a_case_does_not_fit(message: str, expected: bool) -> None:
    assert is_full(message) == expected
