"""scripts/revalidate.py: its bisection on a device that is a number, and one case that is run."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.revalidate import Revalidation, ask_process, bisect, cases, name_of
from scripts.revalidate_one import SAMPLES, Case, config_of, int4_uses, plan_of, program_of

GIB = 1 << 30


@pytest.mark.parametrize("high", [0, 1, 2, 3, 37, 64, 1000])
def test_bisection_finds_the_most_in_as_many_questions_as_bits(high: int) -> None:
    for most in {0, 1, high // 3, high - 1, high, high + 5} - {-1}:
        asked: list[int] = []

        def fits(n: int, most: int = most, asked: list[int] = asked) -> bool:
            asked.append(n)
            return n <= most

        assert bisect(fits, high) == min(most, high)
        assert len(asked) <= high.bit_length()
        assert len(set(asked)) == len(asked)


class Device:
    """A device with 10 GiB, weights of 2 GiB, and a row of 0.1 GiB."""

    def __init__(self) -> None:
        self.asked: list[Case] = []

    def __call__(self, case: Case | None) -> dict[str, Any]:
        if case is None:
            return {"platform": "tpu", "kind": "fake", "limit_bytes": 10 * GIB}
        self.asked.append(case)
        if not case.is_probe:
            return {"median_ms": 2.0, "iqr_ms": [1.9, 2.2], "samples_ms": [2.0] * SAMPLES}
        rows = case.rows + (case.program == "extend")
        return {"fits": (2 + 0.1 * rows) * GIB <= 10 * GIB}


def test_capacities_are_of_rows_that_stay_and_of_one_more_that_comes(tmp_path: Path) -> None:
    device, out = Device(), tmp_path / "results.json"
    run = Revalidation("measure", out, device)
    decode = Case(program="decode", size=1, context=8192)
    run.capacity(decode, None)
    run.capacity(Case(program="extend", size=2048, context=8192), None)

    found = json.loads(out.read_text())["capacity"]
    assert [(c["question"], c["rows"], c["tokens"]) for c in found] == [
        ("decode residency", 80, 80 * 8192),
        ("prefill admission", 79, 79 * 8192),
    ]
    # All rows decode together; an extend keeps its chunk's size.
    assert all(case.size in (case.rows, 2048) and case.is_probe for case in device.asked)
    assert [probe["rows"] for probe in found[0]["probes"]][:2] == [210, 105]


def test_a_probe_that_fails_for_another_reason_ends_the_search(tmp_path: Path) -> None:
    def ask(case: Case | None) -> dict[str, Any]:
        return {"limit_bytes": 10 * GIB} if case is None else {"error": "the process ended with 1"}

    run = Revalidation("measure", tmp_path / "results.json", ask)
    with pytest.raises(SystemExit, match="rows: the process ended with 1"):
        run.capacity(Case(program="decode", size=1, context=8192), None)


@pytest.mark.parametrize("model", ["small", "e2b"])
def test_every_case_has_a_program_and_a_name_of_its_own(model: str) -> None:
    contexts, rows = ((128, 256), (1, 4)) if model == "small" else ((1024, 8192), (1, 8, 32))
    found = list(cases(model, contexts=contexts, rows=rows))
    names = [name_of(case) for case in found]
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
    result = ask_process("measure", case)

    assert len(result["samples_ms"]) == SAMPLES
    low_ms, high_ms = result["iqr_ms"]
    assert 0 < low_ms <= result["median_ms"] <= high_ms
    # Cache and state are updated in place.
    assert result["alias_bytes"] > result["kv_bytes"] > 0


def test_results_are_kept_as_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    run = Revalidation("measure", out, Device())
    for case in list(cases("e2b", contexts=(1024, 8192), rows=(1, 8)))[:2]:
        run.step(case)

    results = json.loads(out.read_text())["results"]
    assert [result["case"]["size"] for result in results] == [1, 8]
    assert "2.000 ms (IQR 1.900 to 2.200)" in capsys.readouterr().out
    assert not out.with_suffix(".partial").exists()
