"""Calls by grammar: what masks let through is read back without repair, fits, and is written alike.

Random tools, random ways through the masks, the project's own parsers and the chat template.
"""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import SchemaError
from jaxserve.guided.calls import CallMarks, CallsSource, CallTool
from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.tables import GrammarSpec, TokenTables
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.openai.tool_calls import decode_arguments
from jaxserve.openai.tool_schemas import argument_types
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.data import render_data
from jaxserve.text.gemma_turn import GemmaTurn
from jaxserve.text.json_turn import JsonTurn
from jaxserve.text.markers import Markers, call_marks
from jaxserve.text.plain_tools import in_plain_text
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.turns import CallArguments, CallStarted, TurnParser, merge
from tests.grammars import random_walk
from tests.property.test_guided import schemas

DATA = Path(__file__).parents[1] / "data"
TOKENIZER = Tokenizer.load(DATA / "tiny_tokenizer")
MARKERS = Markers.find(TOKENIZER)
assert MARKERS is not None
TEMPLATE = ChatTemplate.load(DATA / "gemma4_chat")
VOCABULARY = GrammarVocabulary.build(
    TOKENIZER.pieces, control_ids=TOKENIZER.special_ids, vocab_size=TOKENIZER.vocab_size
)
MARKS = call_marks(MARKERS, VOCABULARY.marks)
NAMES = ("a", "B", "kind", "some name", "é")
ODD_NAMES = (*NAMES, 'q"', "x:y", " s", "", "{", "n,m")

# Of which each value has one spelling, and that is the template's.
plain = st.recursive(
    st.sampled_from(
        [
            {"type": "string", "maxLength": 5},
            {"type": "string", "pattern": "^[a-c]+-[0-9]$"},
            {"type": "string", "format": "date"},
            {"enum": ["x", 'say "hi"\n', None, True, 3, 1.5]},
            {"const": {"b": [1, "é"], "A": {}}},
            {"type": "integer", "minimum": 1},
            {"type": "number", "exclusiveMinimum": 0},
            {"type": ["null", "boolean"]},
        ]
    ),
    lambda parts: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": parts}),
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.sampled_from(NAMES), parts, max_size=3),
                "required": st.just([]),
            }
        ),
        st.fixed_dictionaries({"anyOf": st.lists(parts, min_size=1, max_size=2)}),
    ),
    max_leaves=5,
)


def parameters_of(parts: st.SearchStrategy[Any], names: tuple[str, ...]) -> Any:
    def with_required(properties: dict[str, Any], keep: int) -> dict[str, Any]:
        required = [name for i, name in enumerate(properties) if keep >> i & 1]
        return {"type": "object", "properties": properties, "required": required}

    properties = st.dictionaries(st.sampled_from(names), parts, max_size=4)
    return st.builds(with_required, properties, st.integers(0, 15))


def compiled(
    tools: list[Any], marks: CallMarks | None, *, repeats: bool = True
) -> TokenTables | None:
    source = CallsSource(
        tools=tuple(CallTool(f"tool_{i}", schema, "always") for i, schema in enumerate(tools)),
        marks=marks,
        repeats=repeats,
    )
    try:
        made = compile_grammar(GrammarSpec(kind="calls", source=source.text()), VOCABULARY)
    except SchemaError:
        return None
    return made if isinstance(made, TokenTables) else None


def read_calls(turn: TurnParser, ids: list[int]) -> list[tuple[str, str]]:
    """Return names and arguments of a turn of nothing but calls, read without a repair."""
    events = [event for token_id in ids for event in turn.push(token_id)]
    events = merge([*events, *turn.finish(is_cut=False)])
    assert list(turn.faults) == []
    names = [event.name for event in events if isinstance(event, CallStarted)]
    arguments = [event.text for event in events if isinstance(event, CallArguments)]
    assert len(events) == 3 * len(names)
    return list(zip(names, arguments, strict=True))


def parser(tools: list[Any], marks: CallMarks | None) -> TurnParser:
    types = {f"tool_{i}": argument_types(schema) for i, schema in enumerate(tools)}
    if marks is None:
        return JsonTurn(TOKENIZER, types)
    assert MARKERS is not None
    return GemmaTurn(TOKENIZER, MARKERS, types)


@settings(max_examples=20, deadline=None)
@given(
    tools=st.lists(parameters_of(schemas, ODD_NAMES), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    is_marked=st.booleans(),
)
def test_calls_fit_their_schemas(tools: list[Any], seed: int, is_marked: bool) -> None:
    marks = MARKS if is_marked else None
    tables = compiled(tools, marks)
    if tables is None:
        return
    rng = random.Random(seed)
    for free_tokens in (0, 8, 30):
        ids = random_walk(tables, rng, free_tokens=free_tokens)
        calls = read_calls(parser(tools, marks), ids)
        assert calls
        for name, arguments in calls:
            schema = tools[int(name.removeprefix("tool_"))]
            jsonschema.Draft202012Validator(schema).validate(json.loads(arguments))


@settings(max_examples=40, deadline=None)
@given(
    tools=st.lists(parameters_of(plain, NAMES), min_size=1, max_size=2),
    seed=st.integers(0, 2**32),
    is_marked=st.booleans(),
)
def test_the_next_prompt_spells_calls_as_they_were(
    tools: list[Any], seed: int, is_marked: bool
) -> None:
    marks = MARKS if is_marked else None
    tables = compiled(tools, marks)
    assert tables is not None
    ids = random_walk(tables, random.Random(seed), free_tokens=12)
    calls = read_calls(parser(tools, marks), ids)
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": str(i),
                "function": {"name": name, "arguments": decode_arguments(arguments)},
            }
            for i, (name, arguments) in enumerate(calls)
        ],
    }

    if not is_marked:
        [plain_message] = in_plain_text([message], [])
        # JSON has several ways to spell a character.
        if "\\" not in (text := spelled(ids).decode()):
            assert plain_message["content"] == text
        return

    def render(message: Any) -> str:
        return TEMPLATE.render([message], add_generation_prompt=False)

    assert MARKERS is not None
    _, canonical = render_data(message, render, TOKENIZER, len)
    last = len(canonical) - canonical[::-1].index(MARKERS.call_end)
    canonical = canonical[canonical.index(MARKERS.call_start) : last]
    # The same text, and what the tokenizer makes of it is a way through the masks too.
    assert spelled(canonical) == spelled(ids)
    state = 0
    for token_id in canonical:
        state = tables.advance(state, token_id)
        assert state >= 0
    assert tables.accepting_S[state]


def spelled(ids: list[int]) -> bytes:
    return b"".join(VOCABULARY.token_bytes[token_id] for token_id in ids)
