"""Calls of tools as a grammar: their syntax, their order, what is loosened, and the host's form."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import SchemaError
from jaxserve.guided import compiling
from jaxserve.guided.calls import AnswerSpec, CallMarks, CallsSource, CallTool, Strictness
from jaxserve.guided.checking import TextChecker
from jaxserve.guided.compiling import compile_grammar, host_calls
from jaxserve.guided.guide import MatcherGuide, TablesGuide, opened_start
from jaxserve.guided.host import HostMatcher, HostTokenizer
from jaxserve.guided.tables import (
    MAX_CLASSES,
    MAX_STATES,
    GrammarSpec,
    HostGrammar,
    TablesTooLargeError,
    TokenTables,
)
from jaxserve.guided.triggered import (
    Forced,
    Opening,
    Thought,
    Trigger,
    anything,
    behind_thought,
    opened,
)
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.types import Guide
from tests.grammars import ids_of, random_walk

START, END, QUOTE, THINK, THOUGHT = range(256, 261)
SPELLINGS = {
    "<|tool_call>": START,
    "<tool_call|>": END,
    '<|"|>': QUOTE,
    "<|channel>": THINK,
    "<channel|>": THOUGHT,
}
VOCABULARY = GrammarVocabulary.build(
    {
        **{byte: byte for byte in range(256)},
        **{i: text for text, i in SPELLINGS.items()},
        261: "ab",
    },
    control_ids=SPELLINGS.values(),
)
CONTROLS = {text: VOCABULARY.marks[i] for text, i in SPELLINGS.items()}
MARKS = CallMarks(*(VOCABULARY.marks[i] for i in (START, END, QUOTE)))

LAMP = {
    "type": "object",
    "properties": {
        "room": {"type": "string", "maxLength": 5},
        "level": {"type": "integer", "minimum": 0, "maximum": 9},
        "Mode": {"enum": ["on", 1, None]},
    },
    "required": ["room"],
}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "k": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v"],
}
UNENFORCEABLE = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
CALL = "<|tool_call>call:{}<tool_call|>"


def source(
    *tools: Any, strictness: Strictness = "always", is_json: bool = False, **fields: Any
) -> CallsSource:
    named = tuple(CallTool(name, schema, strictness) for name, schema in tools)
    return CallsSource(tools=named, marks=None if is_json else MARKS, **fields)


def spec(made: CallsSource) -> GrammarSpec:
    return GrammarSpec(kind="calls", source=made.text())


def judged(made: CallsSource, *texts: str) -> list[bool]:
    checker = TextChecker.of(spec(made), controls=CONTROLS)
    return [checker.judge(text.encode()).accepted for text in texts]


def test_a_source_is_read_as_it_was_written() -> None:
    made = source(("f", LAMP), is_opened=True, answer=AnswerSpec("regex", "a*", False))
    assert CallsSource.read(made.text()) == made


def test_arguments_are_written_as_templates_do() -> None:
    good = [
        '{room:<|"|>attic<|"|>}',
        '{level:3,room:<|"|>a"\n,}<|"|>}',
        '{level:3,Mode:<|"|>on<|"|>,room:<|"|><|"|>}',
        '{Mode:null,room:<|"|>é<|"|>}',
    ]
    bad = [
        '{room:<|"|>attics<|"|>}',
        '{room:<|"|>a<|"|>,level:3}',  # not in their order
        '{level: 3,room:<|"|>a<|"|>}',
        '{level:10,room:<|"|>a<|"|>}',
        '{"room":<|"|>a<|"|>}',
        '{room:"a"}',
        "{level:3}",
        '{room:<|"|>a<|"|>,}',
    ]
    texts = [CALL.format(f"lamp{arguments}") for arguments in (*good, *bad)]

    assert judged(source(("lamp", LAMP)), *texts) == [True] * len(good) + [False] * len(bad)


def test_calls_follow_each_other_where_they_may() -> None:
    one, two = CALL.format("f{}"), CALL.format("f{}") * 2
    nothing = {"type": "object", "properties": {}}

    assert (
        judged(source(("f", nothing)), one, two, "", f" {one}", f"{one} ")
        == [True, True] + [False] * 3
    )
    assert judged(source(("f", nothing), repeats=False), one, two) == [True, False]
    behind = one.removeprefix("<|tool_call>")
    assert judged(source(("f", nothing), is_opened=True), behind, one, behind + one) == [
        True,
        False,
        False,
    ]
    answer = AnswerSpec("json_schema", '{"const": 1}', False)
    assert judged(source(("f", nothing), answer=answer), two, "1", f"1{one}") == [True, True, False]


def test_calls_as_json_come_in_blocks_with_one_space() -> None:
    block = '```tool_call\n{{"name": "lamp", "arguments": {}}}\n```'
    good = block.format('{"room": "a\\"", "level": 3}')
    texts = [good, f"{good}\n{good}", block.format('{"room":"a"}'), f"{good}{good}", good + "\n"]

    assert judged(source(("lamp", LAMP), is_json=True), *texts) == [True, True, False, False, False]


@pytest.mark.parametrize(
    "name", ["x:y", "a,b", " a", "a ", "", '"q"', "'q'", "{", "}", "é ü", "a=b"]
)
def test_any_name_can_be_written(name: str) -> None:
    made = source(("f", {"type": "object", "properties": {name: {"const": 1}}}))
    bare, marked = CALL.format(f"f{{{name}:1}}"), CALL.format(f'f{{<|"|>{name}<|"|>:1}}')

    assert sum(judged(made, bare, marked)) == 1


def test_names_that_nobody_lists_are_plain() -> None:
    made = source(("f", {"type": "object", "additionalProperties": {"type": "integer"}}))
    texts = ["{a b:1,c:2}", "{}", "{ a:1}", "{a :1}", "{'a':1}", "{a:1.5}", "{a{:1}"]

    assert judged(made, *(CALL.format(f"f{text}") for text in texts)) == [True] * 2 + [False] * 5


def test_what_is_not_strict_is_any_object() -> None:
    made = source(("f", {}), strictness="never")
    deep = "{a:[{b:[{c:1}]}]}"
    texts = [deep, '{x:<|"|>}<|"|>,y:[null,true,-1.5e3]}', "{x:a}", "[]", "{a:}"]

    assert judged(made, *(CALL.format(f"f{text}") for text in texts)) == [True] * 2 + [False] * 3


def test_what_cannot_be_enforced_is_refused_or_loosened() -> None:
    tools = (("ok", LAMP), ("u", UNENFORCEABLE))
    with pytest.raises(SchemaError) as caught:
        compile_grammar(spec(source(*tools)), VOCABULARY)
    assert caught.value.path == "/1/function/parameters/properties/x"
    assert "'u'" in caught.value.message
    assert caught.value.code == "unsupported_schema"

    loose = source(*tools, strictness="if_possible")
    assert compile_grammar(spec(loose), VOCABULARY).loosened == ("u",)
    texts = (CALL.format("u{x:[1,1],y:2}"), CALL.format("ok{level:3}"))
    assert judged(loose, *texts) == [True, False]
    # One that contains itself has no tables: it is loosened before the others wait for a host.
    trees = source(("t", TREE), ("ok", LAMP), strictness="if_possible")
    assert compile_grammar(spec(trees), VOCABULARY).loosened == ("t",)


def test_the_largest_are_loosened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = {"type": "object", "properties": {"x": {"type": "string", "maxLength": 3000}}}
    large = source(("large", text), ("ok", LAMP), strictness="if_possible")
    monkeypatch.setattr(compiling, "MAX_CALL_STATES", 1500)
    assert compile_grammar(spec(large), VOCABULARY).loosened == ("large",)
    monkeypatch.setattr(compiling, "MAX_CALL_STATES", 50_000)
    monkeypatch.setattr(compiling, "MAX_CALL_TABLE_BYTES", 500_000)
    assert compile_grammar(spec(large), VOCABULARY).loosened == ("large",)
    # What must hold goes to the host whole.
    hosted = compile_grammar(spec(source(("large", text), ("ok", LAMP))), VOCABULARY)
    assert isinstance(hosted, HostGrammar)
    beside = source(("large", text), answer=AnswerSpec("json_object", "", False))
    with pytest.raises(SchemaError, match="both have tables"):
        compile_grammar(spec(beside), VOCABULARY)


def test_arguments_are_objects() -> None:
    for schema in ({"type": "string"}, {"type": "object", "not": {}}):
        with pytest.raises(SchemaError, match="'f'"):
            compile_grammar(spec(source(("f", schema))), VOCABULARY)
    nullable = source(("f", {"type": ["object", "null"], "properties": {}}))
    assert judged(nullable, CALL.format("f{}"), CALL.format("fnull")) == [True, False]


def test_control_tokens_are_no_text() -> None:
    stands_for_one = VOCABULARY.marks[END]
    made = source(("f", {"type": "object", "properties": {stands_for_one: {}}}))
    with pytest.raises(SchemaError, match="plane 16"):
        compile_grammar(spec(made), VOCABULARY)
    with pytest.raises(SchemaError, match="plane 16"):
        host_calls(made, VOCABULARY, "a stack")


# On the host


def hosted(made: CallsSource) -> TextChecker:
    pytest.importorskip("llguidance")
    grammar = host_calls(made, VOCABULARY, "a stack")
    return TextChecker.of(spec(made), grammar, CONTROLS)


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        LAMP,
        {"type": "object", "additionalProperties": {"type": "string", "pattern": "^a+/b$"}},
        {
            "type": "object",
            "properties": {
                "d": {"type": "string", "format": "date"},
                "x:y": {"type": "string", "minLength": 2, "pattern": "b"},
                "l": {"type": "array", "items": {"type": "number", "minimum": 0}, "maxItems": 2},
            },
        },
    ],
)
def test_the_host_takes_what_tables_take(schema: Any, is_json: bool) -> None:
    made = source(("f", schema), ("g", {"type": "object", "properties": {}}), is_json=is_json)
    tables = compile_grammar(spec(made), VOCABULARY)
    assert isinstance(tables, TokenTables)
    checker = hosted(made)
    by_tables = TextChecker.of(spec(made), controls=CONTROLS)
    rng = random.Random(3)
    for free_tokens in (0, 3, 10, 20):
        text = spelled(random_walk(tables, rng, free_tokens=free_tokens))
        assert checker.judge(text).accepted, text
        for _ in range(4):
            at = rng.randrange(len(text))
            spoiled = text[:at] + rng.choice([b"", b"a", b"}", b'"', b"1"]) + text[at + 1 :]
            expected = by_tables.judge(spoiled)
            found = checker.judge(spoiled)
            assert (found.accepted, found.offset) == (expected.accepted, expected.offset), spoiled


def spelled(ids: Sequence[int]) -> bytes:
    by_id = {i: text.encode() for text, i in SPELLINGS.items()}
    return b"".join(by_id.get(i, VOCABULARY.token_bytes[i]) for i in ids)


def test_trees_are_calls_on_the_host() -> None:
    pytest.importorskip("llguidance")
    grammar = compile_grammar(spec(source(("t", TREE))), VOCABULARY)
    assert isinstance(grammar, HostGrammar)
    assert "itself" in grammar.reason
    checker = TextChecker.of(spec(source(("t", TREE))), grammar, CONTROLS)
    texts = ["{v:1}", "{k:[{k:[],v:2}],v:1}", "{v:1,k:[]}", "{k:[{}],v:1}"]
    verdicts = [checker.judge(CALL.format(f"t{text}").encode()) for text in texts]
    assert [verdict.accepted for verdict in verdicts] == [True, True, False, False]
    assert checker.judge(b"call").controls == ("<|tool_call>",)


# What goes before a grammar

OPENINGS = [
    Trigger(START),
    Thought(THOUGHT, THINK),
    Thought(THOUGHT, None),
    Forced((START, ord("a"), START)),
]


@pytest.mark.parametrize("opening", OPENINGS, ids=str)
def test_tables_and_guides_let_the_same_go_before(opening: Opening) -> None:
    is_opened = isinstance(opening, Trigger)
    made = source(("f", LAMP), is_opened=is_opened, repeats=False)
    inner = compile_grammar(spec(made), VOCABULARY)
    assert isinstance(inner, TokenTables)
    tables = opened(inner, opening, vocab_size=VOCABULARY.size, is_text_V=VOCABULARY.is_text_V)
    start = opened_start(
        lambda: TablesGuide(inner),
        opening,
        vocab_size=VOCABULARY.size,
        is_text_V=VOCABULARY.is_text_V,
        num_words=inner.masks_DW.shape[1],
    )
    rng = np.random.default_rng(5)
    for _ in range(30):
        both: list[Guide] = [TablesGuide(tables), start()]
        for _ in range(40):
            masks = [ids_of(guide.allowed_words()) for guide in both]
            assert masks[0] == masks[1]
            assert both[0].may_end == both[1].may_end
            if not masks[0]:
                break
            # Control tokens more often than there are of them.
            following = sorted(masks[0])
            controls = [i for i in following if i in SPELLINGS.values()]
            token_id = int(rng.choice(controls if controls and rng.random() < 0.4 else following))
            for guide in both:
                guide.advance(token_id)


@pytest.mark.parametrize("opening", OPENINGS, ids=str)
@pytest.mark.parametrize("shape", [(MAX_STATES, 1), (1, MAX_CLASSES)])
def test_nothing_goes_before_tables_that_are_full(opening: Opening, shape: tuple[int, int]) -> None:
    inner = compile_grammar(GrammarSpec(kind="regex", source="a+"), VOCABULARY)
    assert isinstance(inner, TokenTables)
    class_of_V = np.arange(MAX_CLASSES, dtype=np.uint16) % shape[1]
    full = replace(inner, class_of_V=class_of_V, next_SC=np.zeros(shape, np.int16))
    is_text_V = np.ones(MAX_CLASSES, np.bool_)
    with pytest.raises(TablesTooLargeError):
        opened(full, opening, vocab_size=MAX_CLASSES, is_text_V=is_text_V)


def test_anything_is_anything() -> None:
    tables = anything(40)
    assert ids_of(tables.masks_DW[0]) == set(range(40))
    assert tables.advance(0, 39) == 0
    assert tables.advance(0, 40) == -1


def test_a_thought_is_text_that_does_not_end() -> None:
    inner = compile_grammar(GrammarSpec(kind="regex", source="a+"), VOCABULARY)
    assert isinstance(inner, TokenTables)
    tables = behind_thought(inner, Thought(THOUGHT, THINK), VOCABULARY.is_text_V)

    def walked(*ids: int) -> bool | None:
        state = 0
        for token_id in ids:
            state = tables.advance(state, token_id)
            if state < 0:
                return None
        return bool(tables.accepting_S[state])

    a, x = ord("a"), ord("x")
    assert walked(a) is walked(a, a) is True
    assert walked() is walked(THINK) is walked(THINK, x, 261) is walked(THINK, THOUGHT) is False
    assert walked(THINK, x, 0xFF, THOUGHT, a) is True
    assert walked(THINK, THINK) is walked(THINK, START) is walked(THOUGHT) is walked(x) is None
    assert walked(a, THINK) is walked(THINK, THOUGHT, THINK) is None
    inside = behind_thought(inner, Thought(THOUGHT, None), VOCABULARY.is_text_V)
    assert inside.advance(0, x) == 0
    assert inside.advance(inside.advance(0, THOUGHT), a) > 0


def test_a_host_s_masks_have_the_control_tokens_that_its_grammar_names() -> None:
    pytest.importorskip("llguidance")
    grammar = host_calls(source(("t", TREE)), VOCABULARY, "a stack")
    guide = MatcherGuide(HostMatcher(HostTokenizer(VOCABULARY), grammar), num_words=9)
    assert ids_of(guide.allowed_words()) == {START}
    for token_id in (START, *b"call:t{v:1}"):
        guide.advance(token_id)
    assert not guide.may_end
    guide.advance(END)
    assert guide.may_end
    assert ids_of(guide.allowed_words()) == {START}
