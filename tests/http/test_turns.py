"""What the model said comes back as the ids that it was, wherever the text is what it was."""

import random
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from jaxserve.http.app import build_app
from jaxserve.http.config import HttpConfig
from jaxserve.http.served_model import ServedModel
from jaxserve.http.turns import Turn, TurnMemory, restore
from jaxserve.metrics import Metrics
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import SamplingDefaults
from tests.fake_engine import FakeEngine, Script
from tests.http.driver import post

CHAT, RENDER = "/v1/chat/completions", "/v1/chat/completions/render"
TINY = Path(__file__).parents[1] / "data" / "tiny_tokenizer"
TOKENIZER = Tokenizer.load(TINY)
END = 106
HI = {"role": "user", "content": "hi"}
NEXT = {"role": "user", "content": "and then?"}
# Tokens of several characters in pieces of fewer, so that no usual tokenization gives them.
# In order: a vocabulary comes in a different one in every process.
WORDS = sorted(i for i, piece in TOKENIZER.pieces.items() if isinstance(piece, str))
PLAIN = [i for i in WORDS if i not in TOKENIZER.special_ids and str(TOKENIZER.pieces[i]).isalpha()]
BLANKS: list[str | int] = [i for i in WORDS if str(TOKENIZER.pieces[i]).isspace()]
BYTE = {piece: i for i, piece in TOKENIZER.pieces.items() if isinstance(piece, int)}


def said(seed: int) -> tuple[int, ...]:
    """An answer that is not tokenized as it is generated: random words, and characters as bytes."""
    rng = random.Random(seed)
    units: list[tuple[int, ...]] = [(rng.choice(PLAIN),) for _ in range(rng.randint(2, 30))]
    for unit in [*("é", "🙂"), *rng.sample(BLANKS, 2)]:
        ids = tuple(BYTE[byte] for byte in unit.encode()) if isinstance(unit, str) else (unit,)
        units.insert(rng.randint(1, len(units) - 1), ids)  # not at an end, where templates strip
    return tuple(i for unit in units for i in unit)


def tiny_model(template: ChatTemplate) -> ServedModel:
    return ServedModel(
        id="tiny",
        tokenizer=TOKENIZER,
        chat_template=template,
        vocab_size=1024,
        max_model_len=4096,
        end_token_ids=frozenset({1, END}),
        placeholder_token_ids=frozenset(),
        created=0,
        defaults=SamplingDefaults(),
    )


MODEL = tiny_model(ChatTemplate.load(TINY))


@pytest.fixture(scope="module")
def gemma4_text() -> ServedModel:
    """The tokenizer with Gemma 4's own template."""
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    source = (TINY.parent / "gemma4_chat" / "chat_template.jinja").read_text()
    return tiny_model(ChatTemplate({"default": source}, special_tokens=names))


def serve(engine: FakeEngine, model: ServedModel = MODEL, **config: Any) -> Starlette:
    return build_app(engine, lambda: model, config=HttpConfig(**config), metrics=Metrics())


async def answer(app: Starlette, messages: list[Any], **fields: Any) -> str:
    reply = await post(app, CHAT, {"messages": messages, **fields})
    assert reply.status == 200, reply.body
    if not fields.get("stream"):
        return str(reply.json["choices"][0]["message"]["content"])
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply.chunks)


async def plain_ids(
    messages: list[Any], model: ServedModel = MODEL, **fields: Any
) -> tuple[int, ...]:
    """What a server that remembers nothing makes of a conversation."""
    reply = await post(serve(FakeEngine(), model), RENDER, {"messages": messages, **fields})
    return tuple(reply.json["token_ids"])


def replying(*answers: tuple[int, ...]) -> FakeEngine:
    return FakeEngine(*(Script(steps=((*ids, END),)) for ids in answers), Script.say("."))


async def second_prompt(
    ids: tuple[int, ...],
    *,
    config: dict[str, Any] | None = None,
    first: dict[str, Any] | None = None,
    then: dict[str, Any] | None = None,
    content: Any = None,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Get an answer and send it back: the first prompt's ids, the second's, and its usual ones."""
    engine = replying(ids)
    app = serve(engine, **(config or {}))
    text = await answer(app, [HI], **(first or {}))
    history = [HI, {"role": "assistant", "content": text if content is None else content}, NEXT]
    await answer(app, history, **(then or {}))
    return engine.prompts[0], engine.prompts[1], await plain_ids(history)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_prompt_goes_on_from_what_was_generated(stream: bool) -> None:
    num_unusual = 0
    for seed in range(40):
        first, second = said(seed), said(1000 + seed)
        engine = replying(first, second)
        app = serve(engine)
        history: list[dict[str, str]] = [HI]
        for generated in (first, second):
            text = await answer(app, history, stream=stream)
            history += [{"role": "assistant", "content": text}, NEXT]
            known = (*engine.prompts[-1], *generated)
            reply = await post(app, RENDER, {"messages": history})
            ids = tuple(reply.json["token_ids"])
            assert ids[: len(known)] == known
            usual = await plain_ids(history)
            num_unusual += ids != usual
            assert _text(ids) == _text(usual) == reply.json["prompt"]
        await answer(app, history)
        assert engine.prompts[-1] == ids
    assert num_unusual > 60  # of 80: the test is about something


def _text(ids: tuple[int, ...]) -> str:
    pieces = [TOKENIZER.pieces[i] for i in ids]
    return b"".join(bytes((p,)) if isinstance(p, int) else p.encode() for p in pieces).decode()


async def test_what_stands_for_a_turn_is_what_this_request_would_be_explained_by() -> None:
    engine = replying(said(3))
    app = serve(engine)
    text = await answer(app, [HI])
    history = [HI, {"role": "assistant", "content": text}, NEXT]
    await post(app, "/v1/cache/explain", {"messages": history})
    await answer(app, history)
    assert engine.cache_calls == [("explain", None, engine.prompts[-1])]


@pytest.mark.parametrize(
    "options",
    [
        {"then": {"cache_salt": "other"}},
        {"first": {"cache_salt": "mine"}},
        {"config": {"remembers_turns": False}},
        {"content": "something else"},
    ],
)
async def test_otherwise_a_turn_is_tokenized_as_usual(options: dict[str, Any]) -> None:
    _, second, usual = await second_prompt(said(5), **options)
    assert second == usual


async def test_of_the_same_salt_it_stands_in() -> None:
    salt = {"cache_salt": "mine"}
    first, second, usual = await second_prompt(said(5), first=salt, then=salt)
    assert second != usual
    assert second[: len(first) + len(said(5))] == (*first, *said(5))


async def test_a_turn_in_parts_stands_in_as_well() -> None:
    ids = said(6)
    parts = [{"type": "text", "text": _text(ids)}]
    first, second, _ = await second_prompt(ids, content=parts)
    assert second[: len(first) + len(ids)] == (*first, *ids)


@pytest.mark.parametrize("at", [0, -1])
async def test_what_the_template_strips_is_not_put_back(at: int) -> None:
    space = next(i for i in WORDS if TOKENIZER.pieces[i] == " ")
    ids = (space, *said(7)) if at == 0 else (*said(7), space)
    _, second, usual = await second_prompt(ids)
    assert second == usual


async def test_a_control_token_that_was_generated_does_not_come_back_as_one() -> None:
    ids = (*said(8), 105, *said(9))  # <|turn>, which the answer's text leaves out or spells
    for skip in (True, False):
        _, second, usual = await second_prompt(ids, first={"skip_special_tokens": skip})
        assert second == usual


async def test_an_answer_cut_by_a_stop_string_is_tokenized_as_usual() -> None:
    ids = said(10)
    stop = _text(ids)[len(_text(ids)) // 2 :][:2]
    _, second, usual = await second_prompt(ids, first={"stop": stop})
    assert second == usual


async def test_an_answer_cut_by_its_budget_stands_in() -> None:
    ids = said(11)
    engine = FakeEngine(Script(steps=(ids,), end="length"), Script.say("."))
    app = serve(engine)
    text = await answer(app, [HI], max_tokens=len(ids))
    await answer(app, [HI, {"role": "assistant", "content": text}, NEXT])
    assert engine.prompts[1][: len(engine.prompts[0]) + len(ids)] == (*engine.prompts[0], *ids)


async def test_each_of_several_answers_may_come_back() -> None:
    first, second = said(12), said(13)
    engine = replying(first, second)
    app = serve(engine)
    reply = await post(app, CHAT, {"messages": [HI], "n": 2})
    for choice, ids in zip(reply.json["choices"], (first, second), strict=True):
        turn = {"role": "assistant", "content": choice["message"]["content"]}
        await answer(app, [HI, turn, NEXT])
        known = (*engine.prompts[0], *ids)
        assert engine.prompts[-1][: len(known)] == known


async def test_a_turn_that_was_continued_comes_back_whole() -> None:
    ids = said(14)
    engine = replying(ids)
    app = serve(engine)
    begun = {"role": "assistant", "content": "well"}
    text = await answer(app, [HI, begun], continue_final_message=True)
    await answer(app, [HI, {"role": "assistant", "content": "well" + text}, NEXT])
    known = (*engine.prompts[0], *ids)
    assert engine.prompts[1][: len(known)] == known


SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agents_turns_stand_in_where_they_are_content(
    gemma4_text: ServedModel, stream: bool
) -> None:
    """Before a call and behind its result; the turn with the call is what the template writes."""
    first, last = said(15), said(16)
    tokenizer = gemma4_text.tokenizer
    call = tokenizer.encode("<|tool_call>call:search{}<tool_call|>", add_special_tokens=False)
    engine = replying(first, tuple(call), last)
    app = serve(engine, gemma4_text)
    fields = {"tools": [SEARCH], "stream": stream}
    history: list[Any] = [HI]
    text = await answer(app, history, **fields)
    history += [{"role": "assistant", "content": text}, NEXT]
    known = (*engine.prompts[0], *first)
    reply = await post(app, CHAT, {"messages": history, "tools": [SEARCH]})
    assert engine.prompts[1][: len(known)] == known
    said_call = reply.json["choices"][0]["message"]
    [called] = said_call["tool_calls"]
    result = {"role": "tool", "tool_call_id": called["id"], "content": "<|turn>nothing<turn|>"}
    history += [said_call, result]
    text = await answer(app, history, **fields)
    known = (*engine.prompts[1], *call)
    assert engine.prompts[2][: len(known)] == known
    history += [{"role": "assistant", "content": text}, NEXT]
    await answer(app, history, **fields)
    known = (*engine.prompts[2], *last)
    assert engine.prompts[3][: len(known)] == known
    assert known != (await plain_ids(history, gemma4_text, tools=[SEARCH]))[: len(known)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_with_calls_stands_in_and_stays_cached(
    gemma4_text: ServedModel, stream: bool
) -> None:
    words, tokenizer = said(17), gemma4_text.tokenizer
    opening, closing = (
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for text in ('<|tool_call>call:search{query:<|"|>', '<|"|>}<tool_call|>')
    )
    call = (*opening, *words, *closing)
    engine = replying((*call, *call))
    app = serve(engine, gemma4_text)
    reply = await post(app, CHAT, {"messages": [HI], "tools": [SEARCH], "stream": stream})
    assert engine.cache_calls == [("keep", None, (*engine.prompts[0], *call, *call, END))]
    message = whole_message(reply) if stream else reply.json["choices"][0]["message"]
    history = [HI, message]
    history += [
        {"role": "tool", "tool_call_id": called["id"], "content": "none"}
        for called in message["tool_calls"]
    ]
    await answer(app, history, tools=[SEARCH])
    known = (*engine.prompts[0], *call, *call)
    assert engine.prompts[1][: len(known)] == known
    assert known != (await plain_ids(history, gemma4_text, tools=[SEARCH]))[: len(known)]
    message["tool_calls"][1]["function"]["arguments"] = '{"query": "cats"}'
    await answer(app, history, tools=[SEARCH])
    assert engine.prompts[2] == await plain_ids(history, gemma4_text, tools=[SEARCH])


def whole_message(reply: Any) -> dict[str, Any]:
    """The message that a client makes of a stream with calls."""
    calls: list[dict[str, Any]] = []
    for chunk in reply.chunks:
        for part in chunk["choices"][0]["delta"].get("tool_calls", []):
            if part["index"] == len(calls):
                calls.append(part)
            else:
                function = calls[part["index"]]["function"]
                function["arguments"] += part["function"]["arguments"]
    return {"role": "assistant", "content": None, "tool_calls": calls}


async def test_later_requests_may_go_on_from_where_each_turn_began() -> None:
    engine = replying(said(18))
    history = [HI, {"role": "assistant", "content": "one"}, NEXT]
    history += [{"role": "assistant", "content": "two"}, NEXT]
    await answer(serve(engine), history)
    [request] = engine.requests
    prompts = [await plain_ids(history[:1]), await plain_ids(history[:3])]
    assert request.resume_points == tuple(map(len, prompts))
    assert all(request.prompt_ids[: len(prompt)] == prompt for prompt in prompts)


async def test_a_flush_forgets_the_turns_too() -> None:
    ids = said(19)
    engine = replying(ids)
    app = serve(engine)
    text = await answer(app, [HI])
    history = [HI, {"role": "assistant", "content": text}, NEXT]
    await post(app, "/v1/cache/flush", {})
    await answer(app, history)
    assert engine.prompts[1] == await plain_ids(history)


async def test_a_prompt_that_would_not_fit_with_the_generated_ids_has_its_usual_ones() -> None:
    ids = said(20)
    engine = replying(ids)
    app = serve(engine)
    text = await answer(app, [HI])
    history = [HI, {"role": "assistant", "content": text}, NEXT]
    usual = await plain_ids(history)
    room = MODEL.max_model_len - len(usual)
    await answer(app, history, max_tokens=room)
    assert engine.prompts[1] == usual
    await answer(app, history, max_tokens=room // 2)
    assert len(engine.prompts[2]) > len(usual)


def turn_of(text: str, *before: int) -> Turn:
    """A turn behind some ids, each of its characters a token."""
    memory = TurnMemory()
    letters = [TOKENIZER.token_id(letter) or 0 for letter in text]
    memory.remember(None, "x", (*before, 105), letters, TOKENIZER)
    [turn] = memory.find(None, ["x"])
    return turn


def test_text_that_spells_a_control_token_does_not_become_one() -> None:
    letters = [TOKENIZER.token_id(letter) or 0 for letter in "<|turn>cat"]
    assert restore([7, *letters], [turn_of("cat", 7)], TOKENIZER) == [7, *letters]
    [a, c, t] = [TOKENIZER.token_id(letter) or 0 for letter in "act"]
    cat = TOKENIZER.encode("cat", add_special_tokens=False)
    assert cat != [c, a, t]
    assert restore([7, 105, *cat, END], [turn_of("cat", 7)], TOKENIZER) == [7, 105, c, a, t, END]
    # Nor does a control token become text.
    ended = [7, 105, c, END]
    assert restore(ended, [turn_of("c<turn|>", 7)], TOKENIZER) == ended
    assert restore([7, 105], [turn_of("cat", 7)], TOKENIZER) == [7, 105]
    assert restore([7], [turn_of("cat", 7)], TOKENIZER) == [7]


def test_a_turn_stands_in_only_as_a_whole_and_behind_what_it_came_behind() -> None:
    cat = TOKENIZER.encode("cat", add_special_tokens=False)
    [a, c, t] = [TOKENIZER.token_id(letter) or 0 for letter in "act"]
    assert restore([8, 105, *cat, END], [turn_of("cat", 7)], TOKENIZER) == [8, 105, *cat, END]
    cats = [*cat, t, END]
    assert restore([7, 105, *cats], [turn_of("cat", 7)], TOKENIZER) == [7, 105, *cats]
    both = [turn_of("cat", 7), turn_of("catt", 7)]
    assert restore([7, 105, *cats], both, TOKENIZER) == [7, 105, c, a, t, t, END]


def test_the_least_recently_used_turns_are_forgotten() -> None:
    memory, word = TurnMemory(max_bytes=3 * 700), PLAIN[0]
    for text in ("a", "b", "c"):
        memory.remember(None, text, (2, 105, word), (word,) * 10, TOKENIZER)
    assert [len(memory.find(None, [text])) for text in "abc"] == [1, 1, 1]
    memory.find(None, ["a"])
    memory.remember(None, "d", (2, 105, word), (word,) * 10, TOKENIZER)
    assert [len(memory.find(None, [text])) for text in "abcd"] == [1, 0, 1, 1]
    memory.remember(None, "e", (2, 105, word), (word,) * 1000, TOKENIZER)
    assert memory.find(None, "abcde") == []  # larger than all of it


def test_the_same_words_at_several_places_are_kept_apart() -> None:
    memory, word = TurnMemory(), PLAIN[0]
    for length in (3, 5, 3):
        memory.remember(None, "ok", (word,) * length + (105, word), (word,), TOKENIZER)
    memory.remember(None, "ok", (word,) * 100, (word,), TOKENIZER)  # no control token opens it
    memory.remember(None, "ok", (2, 105), (), TOKENIZER)
    memory.remember("salt", "ok", (105,), (word,), TOKENIZER)
    assert [turn.start for turn in memory.find(None, ["ok", "ok"])] == [5, 3]
    assert [turn.start for turn in memory.find("salt", ["ok"])] == [0]
    for length in range(300):
        memory.remember(None, "ok", (word,) * length + (105, word), (word,), TOKENIZER)
    assert [turn.start for turn in memory.find(None, ["ok"])] == list(range(44, 300))
