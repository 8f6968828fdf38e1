"""Cases that lie beside the checkout: our own collection, and the official JSON Schema test suite.

They are data of others and are not copied; without them these tests are skipped.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import SchemaError
from jaxserve.guided.checking import TextChecker
from jaxserve.guided.tables import GrammarSpec

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared/cases"
CASES = sorted((SHARED / "guided").glob("*.json"))
SUITE = sorted((SHARED / "json-schema-suite/draft2020-12").glob("*.json"))
LEAST_RIGHT = 700


def check(schema: Any) -> TextChecker:
    return TextChecker.of(GrammarSpec(kind="json_schema", source=json.dumps(schema)))


@pytest.mark.skipif(not CASES, reason=f"no cases at {SHARED / 'guided'}")
def test_all_cases_hold() -> None:
    wrong = []
    for path in CASES:
        case = json.loads(path.read_text())
        try:
            checker = check(case["schema"])
        except SchemaError as error:
            if not case["may_refuse"]:
                wrong.append((path.name, "refused", error.message))
            continue
        fitting = case["valid"] + case["valid_compact"]
        for text in fitting + case["invalid"]:
            accepted = checker.judge(text.encode()).accepted
            if accepted != (text in fitting):
                wrong.append((path.name, "accepted" if accepted else "rejected", text))

    assert wrong == []


@pytest.mark.skipif(not SUITE, reason=f"no JSON Schema test suite at {SHARED}")
def test_nothing_that_the_official_suite_rejects_is_accepted() -> None:
    pytest.importorskip("llguidance")
    counts: Counter[str] = Counter()
    wrongly_accepted = []
    for path in SUITE:
        for group in json.loads(path.read_text()):
            try:
                checker = check(group["schema"])
            except SchemaError as error:
                nothing_fits = "no value fits" in error.message
                rejected_anyway = not any(test["valid"] for test in group["tests"])
                assert nothing_fits <= rejected_anyway, group["description"]
                counts["refused groups"] += 1
                counts["in refused groups"] += len(group["tests"])
                counts["in groups that nothing fits"] += nothing_fits * len(group["tests"])
                continue
            for test in group["tests"]:
                accepted = checker.judge(json.dumps(test["data"]).encode()).accepted
                if accepted and not test["valid"]:
                    wrongly_accepted.append((path.name, group["description"], test["data"]))
                counts["right" if accepted == test["valid"] else "wrongly rejected"] += 1

    assert wrongly_accepted == []
    assert counts["right"] >= LEAST_RIGHT, counts
