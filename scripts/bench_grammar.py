"""Measure how long grammars take to compile; docs/guided.md shows the results.

    python scripts/bench_grammar.py --model DIR [--tools 100]

Tools as agents have them are put together from usual parameters, always the same ones for a seed:
most with one to six parameters, one in ten with up to sixteen, nested objects and lists among them.
CPU time counts, from a schema's text to its tables; what a process does once (the tokenizer, the
tree of its tokens) is told apart. The first tools are compiled before, for libraries to settle in.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from jaxserve.errors import SchemaError
from jaxserve.guided.calls import CallsSource, CallTool
from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.tables import GrammarSpec, HostGrammar, TokenTables
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.text.tokenizer import Tokenizer

SEED = 7
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string"},
        "city": {"type": "string"},
        "postal_code": {"type": "string", "pattern": "^[0-9A-Z -]{3,10}$"},
        "country": {"type": "string", "minLength": 2, "maxLength": 2},
    },
    "required": ["street", "city"],
    "additionalProperties": False,
}
LINE = {
    "type": "object",
    "properties": {
        "sku": {"type": "string"},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
        "price": {"type": "number", "minimum": 0},
    },
    "required": ["sku", "quantity"],
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "query": {"type": "string", "description": "What to look for"},
    "city": {"type": "string"},
    "title": {"type": "string", "maxLength": 120},
    "summary": {"type": "string", "maxLength": 500},
    "path": {"type": "string", "pattern": "^/[a-zA-Z0-9_./-]*$"},
    "command": {"type": "string", "minLength": 1},
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit", "kelvin"]},
    "priority": {"enum": ["low", "normal", "high", "urgent"]},
    "language": {"type": "string", "enum": ["en", "de", "fr", "es", "it", "pt", "ja", "zh", "ko"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "offset": {"type": "integer", "minimum": 0},
    "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 3600},
    "latitude": {"type": "number", "minimum": -90, "maximum": 90},
    "longitude": {"type": "number", "minimum": -180, "maximum": 180},
    "amount": {"type": "number", "multipleOf": 0.01, "minimum": 0},
    "verbose": {"type": "boolean", "default": False},
    "recursive": {"type": "boolean"},
    "parent": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "assignee": {"type": ["string", "null"]},
    "due": {"type": "string", "format": "date"},
    "starts_at": {"type": "string", "format": "date-time"},
    "to": {"type": "array", "items": {"type": "string", "format": "email"}, "minItems": 1},
    "url": {"type": "string", "format": "uri"},
    "id": {"type": "string", "format": "uuid"},
    "ticket": {"type": "string", "pattern": "^[A-Z]{2,5}-[0-9]+$"},
    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 10},
    "days": {
        "type": "array",
        "items": {"enum": ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]},
        "uniqueItems": True,
    },
    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    "headers": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    "address": ADDRESS,
    "lines": {"type": "array", "items": LINE, "minItems": 1},
    "filter": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "field": {"type": "string"},
                    "equals": {"type": ["string", "number"]},
                },
                "required": ["field", "equals"],
            },
            {
                "type": "object",
                "properties": {"field": {"type": "string"}, "before": {"type": "string"}},
                "required": ["field", "before"],
            },
        ]
    },
    "position": {"$ref": "#/$defs/Point"},
    "route": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "maxItems": 20},
}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
    "required": ["x", "y"],
}


def make_tools(count: int) -> list[dict[str, Any]]:
    rng = random.Random(SEED)
    tools = []
    for number in range(count):
        size = rng.randint(9, 16) if number % 10 == 9 else rng.randint(1, 6)
        names = rng.sample(list(PARAMETERS), size)
        parameters: dict[str, Any] = {
            "type": "object",
            "properties": {name: PARAMETERS[name] for name in names},
            "required": [name for name in names if rng.random() < 0.5],
            "$defs": {"Point": POINT},
        }
        if rng.random() < 0.5:
            parameters["additionalProperties"] = False
        function = {"name": f"tool_{number}", "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def load_vocabulary(folder: Path) -> GrammarVocabulary:
    tokenizer = Tokenizer.load(folder)
    begun_s = time.process_time()
    vocabulary = GrammarVocabulary.build(
        tokenizer.pieces, control_ids=tokenizer.special_ids, vocab_size=tokenizer.vocab_size
    )
    nodes = sum(len(level.byte_N) for level in vocabulary.tree.levels)
    print(
        f"{vocabulary.size} tokens, tree of {nodes} nodes, made once in"
        f" {time.process_time() - begun_s:.2f} s"
    )
    return vocabulary


def measure(name: str, specs: list[GrammarSpec], vocabulary: GrammarVocabulary) -> None:
    times_s, tables, refused, on_host = [], [], 0, 0
    for spec in specs[:3]:
        compile_grammar(spec, vocabulary)
    for spec in specs:
        begun_s = time.process_time()
        try:
            grammar = compile_grammar(spec, vocabulary)
        except SchemaError as error:
            print(f"refused: {error.message}")
            refused += 1
            continue
        times_s.append(time.process_time() - begun_s)
        if isinstance(grammar, TokenTables):
            tables.append(grammar.stats)
        on_host += isinstance(grammar, HostGrammar)
    times_s.sort()
    print(
        f"{name}: {len(specs)} grammars, {refused} refused, {on_host} on the host; CPU s:"
        f" p50 {quantile(times_s, 0.5):.3f}, p95 {quantile(times_s, 0.95):.3f},"
        f" max {times_s[-1]:.3f}"
    )
    if not tables:
        return
    for index, field in enumerate(("states", "classes", "masks", "bytes")):
        sizes = sorted(stats[index] for stats in tables)
        print(
            f"  {field}: p50 {quantile(sizes, 0.5)}, p95 {quantile(sizes, 0.95)}, max {sizes[-1]}"
        )


def quantile(ordered: list[Any], share: float) -> Any:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--tools", type=int, default=100, help="how many tools")
    arguments = parser.parse_args()
    vocabulary = load_vocabulary(arguments.model)
    tools = make_tools(arguments.tools)
    parameters = [tool["function"]["parameters"] for tool in tools]
    schemas = [GrammarSpec(kind="json_schema", source=json.dumps(x)) for x in parameters]
    measure("parameters of one tool", schemas, vocabulary)
    calls = [
        CallTool(tool["function"]["name"], tool["function"]["parameters"], "always")
        for tool in tools
    ]
    unions = [
        GrammarSpec(kind="calls", source=CallsSource(tools=tuple(calls[at : at + 5])).text())
        for at in range(0, len(calls), 5)
    ]
    measure("calls of five tools, as JSON", unions, vocabulary)


if __name__ == "__main__":
    main()
