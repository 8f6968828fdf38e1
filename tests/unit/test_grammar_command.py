"""`jaxserve grammar check`, run as people run it."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import main

MODEL = Path(__file__).parents[1] / "data/tiny_tokenizer"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def write(folder: Path, name: str, content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text)
    return str(folder / name)


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = main(["grammar", "check", "--model", str(MODEL), *arguments])
    return code, capsys.readouterr().out.splitlines()


def test_one_json_line_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = write(tmp_path, "schema", SCHEMA)
    texts = [write(tmp_path, str(n), x) for n, x in enumerate(['{"a": 1}', '{"a": x}', '{"a":'])]

    code, lines = check(
        capsys, "--schema", schema, "--json", "--text", *texts[:2], "--text", texts[2]
    )

    assert code == 0
    assert [(x["accepted"], x["offset"]) for x in map(json.loads, lines)] == [
        (True, 8),
        (False, 6),
        (False, 5),
    ]
    assert json.loads(lines[1])["allowed"] == "- 0-9"


def test_sizes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = check(capsys, "--schema", write(tmp_path, "schema", SCHEMA), "--json")

    fields = json.loads(lines[0])
    assert code == 0
    assert fields["path"] == "tables"
    assert fields["num_states"] == 11


def test_people_get_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write(tmp_path, "text", "aabx")

    code, lines = check(capsys, "--regex", "a*b", "--text", text)

    assert code == 0
    assert lines[0] == "path: tables"
    assert lines[-1].endswith("rejected at byte 3, where may come: end of text")


def test_a_refusal_names_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = write(tmp_path, "schema", {"properties": {"a": {"type": "banana"}}})

    code, lines = check(capsys, "--schema", schema, "--json")

    assert code == 2
    error = json.loads(lines[0])["error"]
    assert (error["path"], error["keyword"], error["code"]) == (
        "/properties/a",
        "type",
        "invalid_schema",
    )


def test_tools_are_the_calls_that_the_model_may_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "g"}},
    ]
    calls = [
        "<|tool_call>call:f{a:1}<tool_call|>",
        "<|tool_call>call:g{}<tool_call|><|tool_call>call:f{a:2}<tool_call|>",
        "<|tool_call>call:f{}<tool_call|>",
        '<|tool_call>call:f{a:<|"|>1<|"|>}<tool_call|>',
        "<|tool_call>call:h",
        "call:g{}",
    ]
    texts = [write(tmp_path, str(number), call) for number, call in enumerate(calls)]

    code, lines = check(
        capsys, "--tools", write(tmp_path, "tools", tools), "--json", "--text", *texts
    )

    assert code == 0
    verdicts = [json.loads(line) for line in lines]
    assert [verdict["accepted"] for verdict in verdicts] == [True, True, False, False, False, False]
    assert [verdict["offset"] for verdict in verdicts[2:]] == [19, 21, 17, 0]
    assert verdicts[-1]["allowed"] == "<|tool_call>"


def test_a_tool_that_cannot_be_enforced_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    code, lines = check(capsys, "--tools", write(tmp_path, "tools", tools), "--json")

    assert code == 2
    error = json.loads(lines[0])["error"]
    assert error["path"] == "/0/function/parameters/properties/x"
    assert "'f'" in error["message"]
    assert check(capsys, "--tools", write(tmp_path, "tools", []), "--json")[0] == 2


def test_files_that_cannot_be_read_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = check(capsys, "--schema", "/nowhere/schema.json")

    assert code == 2
