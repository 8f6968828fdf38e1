"""`jaxserve grammar check`: what a grammar compiles to, and what it says of texts.

Exit codes: 0 the grammar can be used (whatever it says of the texts), 2 it is refused, or a flag or
file is wrong, 3 the model's tokenizer cannot be read.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, InvalidRequestError, SchemaError
from jaxserve.guided.calls import CallMarks
from jaxserve.guided.checking import TextChecker, described
from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.tables import Grammar, GrammarSpec, HostGrammar
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.hub.resolve import resolve_model
from jaxserve.openai.call_grammar import calls_spec
from jaxserve.openai.tools import TOOLS, ToolUse
from jaxserve.text.markers import Markers, call_marks, control_marks
from jaxserve.text.tokenizer import Tokenizer


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its flags."""
    grammar = commands.add_parser("grammar", help="work with grammars of guided decoding")
    actions = grammar.add_subparsers(dest="action", required=True)
    check = actions.add_parser(
        "check", help="compile a grammar and judge texts by it; exit code 2: it is refused"
    )
    check.add_argument(
        "--model",
        required=True,
        metavar="DIR_OR_NAME",
        help="whose tokenizer to compile for, as in `jaxserve serve`",
    )
    source = check.add_mutually_exclusive_group(required=True)
    source.add_argument("--schema", metavar="FILE", help="a JSON Schema")
    source.add_argument("--regex", metavar="R", help="a regular expression of the whole text")
    source.add_argument("--tools", metavar="FILE", help="a list of tools, in OpenAI's form")
    source.add_argument("--choice", action="append", metavar="TEXT", help="may be repeated")
    source.add_argument("--lark", metavar="FILE", help="a grammar in Lark's form")
    check.add_argument(
        "--text",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="a text to judge, byte by byte, a newline at its end included; -: standard input",
    )
    check.add_argument("--compact", action="store_true", help="no space after , and :")
    check.add_argument(
        "--json", action="store_true", help="one JSON line a text; without texts, one in all"
    )


def run(arguments: dict[str, Any], cache_dir: Path) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a file cannot be read.
        ModelLoadError: the tokenizer cannot be read.
    """
    as_json: bool = arguments["json"]
    tokenizer = Tokenizer.load(resolve_model(arguments["model"], cache_dir=cache_dir))
    markers = Markers.find(tokenizer)
    vocabulary = _vocabulary(tokenizer, markers)
    spec = _spec(arguments, call_marks(markers, vocabulary.marks))
    controls = control_marks(markers, vocabulary.marks) if spec.kind == "calls" else {}
    texts = {name: _read(name) for name in arguments["text"]}
    begun_s = time.process_time()
    try:
        grammar = compile_grammar(spec, vocabulary)
        compile_s = time.process_time() - begun_s
        checker = TextChecker.of(spec, grammar, controls) if texts else None
    except SchemaError as error:
        _write_refusal(error, as_json)
        return 2
    if not (as_json and texts):
        _write_stats(grammar, compile_s, as_json)
    for name, text in texts.items():
        if checker is not None:
            _write_verdict(checker, name, text, as_json)
    return 0


def _vocabulary(tokenizer: Tokenizer, markers: Markers | None) -> GrammarVocabulary:
    vocabulary = GrammarVocabulary.build(
        tokenizer.pieces,
        control_ids=tokenizer.special_ids.union(markers.spellings.values() if markers else ()),
        vocab_size=tokenizer.vocab_size,
    )
    # So that the time that is told is the grammar's own.
    _ = vocabulary.tree, vocabulary.spells_all_bytes
    return vocabulary


def _spec(arguments: dict[str, Any], marks: CallMarks | None) -> GrammarSpec:
    compact: bool = arguments["compact"]
    if arguments["regex"] is not None:
        return GrammarSpec(kind="regex", source=arguments["regex"])
    if arguments["choice"] is not None:
        return GrammarSpec(kind="choice", source=json.dumps(arguments["choice"]))
    if arguments["lark"] is not None:
        return GrammarSpec(kind="lark", source=_read_text(arguments["lark"]))
    if arguments["tools"] is not None:
        try:
            tools = TOOLS.read(json.loads(_read_text(arguments["tools"])), "tools")
            if not tools:
                raise ValueError("there are no tools")
            use = ToolUse(offered=tools, must_call=True)
            return calls_spec(use, marks, strict_by_default=True)
        except (ValueError, InvalidRequestError) as error:
            raise ConfigError(f"{arguments['tools']}: {error}") from error
    return GrammarSpec(kind="json_schema", source=_read_text(arguments["schema"]), compact=compact)


def _read(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error}") from error


def _read_text(name: str) -> str:
    try:
        return _read(name).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8: {error}") from error


def _write_refusal(error: SchemaError, as_json: bool) -> None:
    if as_json:
        _write_line(json.dumps({"refused": True, "error": error.fault}, ensure_ascii=False))
        return
    _write_line(f"refused ({error.code}): {error.message}")
    if error.path is not None:
        _write_line(f"place: {error.path or '(root)'}")


def _write_stats(grammar: Grammar, compile_s: float, as_json: bool) -> None:
    path = "host" if isinstance(grammar, HostGrammar) else "tables"
    fields = {"path": path, **described(grammar), "compile_s": round(compile_s, 4)}
    if as_json:
        _write_line(json.dumps(fields))
    else:
        _write_line("\n".join(f"{name}: {value}" for name, value in fields.items()))


def _write_verdict(checker: TextChecker, name: str, text: bytes, as_json: bool) -> None:
    verdict = checker.judge(text)
    if as_json:
        _write_line(json.dumps(verdict.told() | {"text": name}, ensure_ascii=False))
    elif verdict.accepted:
        _write_line(f"{name}: accepted")
    else:
        _write_line(
            f"{name}: rejected at byte {verdict.offset}, where may come: {verdict.expected}"
        )


def _write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
