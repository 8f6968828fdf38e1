"""Turns: whatever a model writes, calls have JSON arguments, and no cut of the text matters."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text.call_arguments import ArgumentsWriter
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.data import render_data
from jaxserve.text.gemma_turn import GemmaTurn
from jaxserve.text.json_turn import CALL_FENCE, JsonTurn
from jaxserve.text.markers import Markers
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.turns import CallArguments, CallEnded, CallStarted, Content, TurnEvent, merge

DATA = Path(__file__).parents[1] / "data"
TOKENIZER = Tokenizer.load(DATA / "tiny_tokenizer")
MARKERS = Markers.find(TOKENIZER)
TEMPLATE = ChatTemplate.load(DATA / "gemma4_chat")
TOOLS = {"set_lamp": {"room": "string", "level": "integer", "on": "boolean"}, "b": {}}
SPELLED_MARKERS = [
    *('<|"|>', "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"),
    *("<|tool_response>", "<|turn>", "<turn|>"),
]

# Pieces that turns are made of, right and wrong.
PIECES = st.sampled_from(
    [
        *SPELLED_MARKERS,
        *("call:", "set_lamp", "b", "{", "}", "(", ")", "[", "]", ",", ":", "=", " ", "\n"),
        *("room", "level", '"', "'", "\\", "\\u00e9", "\\ud800", "1", "-0.5e3", "true", "None"),
        *("thought\n", "é", "🙂", "the lamp", CALL_FENCE, "```", '{"name": "b", "arguments": {'),
        *("NaN", "1e999", '{"arguments": {"k": [NaN, 1.50], "t": "\\ud800"}, "name": "b"}'),
        # What it takes to get far into the grammar.
        *("<|tool_call>call:b{", "<|tool_call>call:set_lamp{room:", '<|"|>attic<|"|>,level:'),
    ]
)
TURNS = st.lists(PIECES, max_size=40).map("".join)

KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


STAND_INS = {0xE000: "<", 0xE001: "["}


def read(turn: GemmaTurn | JsonTurn, token_ids: list[int], *, is_cut: bool) -> list[TurnEvent]:
    events = [event for token_id in token_ids for event in turn.push(token_id)]
    return merge([*events, *turn.finish(is_cut=is_cut)])


def gemma(tools: Any = TOOLS) -> GemmaTurn:
    assert MARKERS is not None
    return GemmaTurn(TOKENIZER, MARKERS, tools)


def spelled_in_bytes(text: str) -> list[int]:
    """Ids of a text of which each byte is a token, but control tokens are themselves."""
    ids = []
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        if token_id in TOKENIZER.special_ids:
            ids.append(token_id)
        else:
            piece = TOKENIZER.piece(token_id)
            data = bytes([piece]) if isinstance(piece, int) else piece.encode()
            ids += [TOKENIZER.token_id(f"<0x{byte:02X}>") or 0 for byte in data]
    return ids


def is_json_object(text: str) -> bool:
    """Whether a text is one by the letter: no NaN, no half of a surrogate pair."""
    text.encode()
    value = json.loads(text, parse_constant=pytest.fail)
    json.dumps(value, ensure_ascii=False).encode()
    return isinstance(value, dict)


def check(events: list[TurnEvent], *, is_cut: bool) -> None:
    """Calls come in order, and complete ones have an object for arguments."""
    num_calls, arguments = 0, ""
    open_call = None
    for event in events:
        if isinstance(event, CallStarted):
            assert (event.index, open_call) == (num_calls, None)
            open_call, arguments = event.index, ""
            num_calls += 1
        elif isinstance(event, CallArguments):
            assert event.index == open_call
            arguments += event.text
        elif isinstance(event, CallEnded):
            assert event.index == open_call
            assert is_json_object(arguments)
            open_call = None
        else:
            assert event.text
            assert open_call is None
    assert open_call is None or is_cut


@settings(max_examples=150, deadline=None)
@given(text=TURNS, is_cut=st.booleans(), offers=st.booleans())
def test_any_turn_gives_the_same_events_however_it_is_spelled(
    text: str, is_cut: bool, offers: bool
) -> None:
    tools = TOOLS if offers else None
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    events = read(gemma(tools), ids, is_cut=is_cut)

    check(events, is_cut=is_cut)
    assert read(gemma(tools), spelled_in_bytes(text), is_cut=is_cut) == events
    if not offers:
        assert not any(isinstance(event, CallStarted) for event in events)


@settings(max_examples=100, deadline=None)
@given(text=TURNS, is_cut=st.booleans())
def test_any_json_turn_gives_the_same_events_however_it_is_spelled(text: str, is_cut: bool) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    events = read(JsonTurn(TOKENIZER, TOOLS), ids, is_cut=is_cut)

    check(events, is_cut=is_cut)
    assert read(JsonTurn(TOKENIZER, TOOLS), spelled_in_bytes(text), is_cut=is_cut) == events


@settings(max_examples=100, deadline=None)
@given(arguments=st.dictionaries(KEYS, VALUES, max_size=5))
def test_what_the_template_writes_is_read_back(arguments: dict[str, Any]) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "b"}}]}
    message["tool_calls"][0]["function"]["arguments"] = arguments  # type: ignore[index]
    turn = gemma()

    def render(message: Any) -> str:
        return TEMPLATE.render([message], add_generation_prompt=False)

    assert MARKERS is not None
    _, ids = render_data(message, render, TOKENIZER, len)
    ids = ids[ids.index(MARKERS.call_start) : ids.index(MARKERS.call_end) + 1]

    events = read(turn, ids, is_cut=False)

    assert turn.faults == []
    assert isinstance(events[1], CallArguments)
    assert json.loads(events[1].text) == arguments


@settings(max_examples=100, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=5), VALUES, max_size=5), indent=st.booleans())
def test_json_arguments_are_read_back(arguments: dict[str, Any], indent: bool) -> None:
    body = json.dumps(
        {"name": "b", "arguments": arguments}, indent=2 if indent else None, ensure_ascii=True
    )
    turn = JsonTurn(TOKENIZER, TOOLS)
    text = f"I see.\n{CALL_FENCE}\n{body}\n```\n"

    # As JSON the text may spell control tokens, which are none here.
    ids = TOKENIZER.encode(
        text.replace("<", "\ue000").replace("[", "\ue001"),
        add_special_tokens=False,
        stand_ins=STAND_INS,
    )
    events = read(turn, ids, is_cut=False)

    assert turn.faults == []
    assert events[0] == Content("I see.\n")
    assert isinstance(events[2], CallArguments)
    assert json.loads(events[2].text) == arguments


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.text("ab1{}[](),:=\"'\\ue0", max_size=6) | st.none(), max_size=12),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    has_json_strings=st.booleans(),
)
def test_arguments_do_not_depend_on_how_text_is_cut(
    pieces: list[str | None], sizes: list[int], has_json_strings: bool
) -> None:
    def write(is_cut: bool) -> tuple[str, str]:
        writer = ArgumentsWriter({"a": "string", "b": "number"}, has_json_strings=has_json_strings)
        out, rest, turn = [], "", 0
        for piece in pieces:
            if piece is None:
                out.append(writer.delimit())
                continue
            while piece:
                size = sizes[turn % len(sizes)] if is_cut else len(piece)
                turn += 1
                out.append(writer.push(piece[:size]))
                piece = piece[size:]
        rest = writer.rest
        return "".join([*out, writer.close()]), rest

    whole, rest = write(is_cut=False)
    assert write(is_cut=True) == (whole, rest)
    assert is_json_object(whole)


@pytest.mark.parametrize("text", ["[" * 3000, "{a:" * 3000, "}" * 3000, "x:" + "(" * 3000])
def test_deep_or_odd_nesting_is_no_fault(text: str) -> None:
    events = read(
        gemma(),
        TOKENIZER.encode(f"<|tool_call>call:b{{k:{text}", add_special_tokens=False),
        is_cut=False,
    )
    assert any(isinstance(event, CallEnded) for event in events)
