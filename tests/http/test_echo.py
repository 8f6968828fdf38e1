"""The prompt in front of the answer, and prompts that are cut."""

import pytest

from tests.fake_engine import BOS, EOS, FakeEngine, Script, ids
from tests.http.conftest import Serve
from tests.http.driver import post

CHAT = "/v1/chat/completions"
URL = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_begins_with_its_prompt(serve: Serve, stream: bool) -> None:
    engine = FakeEngine(*(Script.say(text) for text in ("1", "2", "3", "4")))
    request = {"prompt": ["a ", "bé"], "n": 2, "echo": True, "stream": stream}
    reply = await post(serve(engine), URL, request)
    answers = reply.chunks if stream else [reply.json]
    texts = ["", "", "", ""]
    for choice in (choice for answer in answers for choice in answer["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == ["a 1", "a 2", "bé3", "bé4"]


@pytest.mark.parametrize(
    ("prompt", "skip", "text"),
    [
        ("<bos>a<pad>", True, "<bos>a<pad>"),  # as it was sent
        ([BOS, *ids("a"), EOS], True, "a"),
        ([BOS, *ids("a"), EOS], False, "<bos>a<eos>"),
        ([*ids("é"), *ids(b"\xc3")], True, "\ufffd\ufffd\ufffd"),  # one broken run
    ],
)
async def test_what_ids_stand_for(serve: Serve, prompt: object, skip: bool, text: str) -> None:
    request = {"prompt": prompt, "echo": True, "skip_special_tokens": skip}
    reply = await post(serve(FakeEngine(Script.say("!"))), URL, request)
    assert reply.json["choices"][0]["text"] == text + "!"


@pytest.mark.parametrize("end", ["length", "stop"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_alone(serve: Serve, stream: bool, end: str) -> None:
    # The engine generates one token, which is nobody's, were it an end id.
    script = Script(steps=((EOS,),) if end == "stop" else (ids("x"),), end=end)  # type: ignore[arg-type]
    engine = FakeEngine(script)
    request = {"prompt": "hi", "echo": True, "max_tokens": 0, "logprobs": 0, "stream": stream}
    reply = await post(serve(engine), URL, {**request, "return_token_ids": True})
    assert engine.requests[0].sampling.max_tokens == 1
    choices = [answer["choices"][0] for answer in (reply.chunks if stream else [reply.json])]
    assert "".join(choice["text"] for choice in choices) == "hi"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("length", None)
    assert not any(choice.get("token_ids") for choice in choices)
    told = next(choice["logprobs"] for choice in choices if choice["logprobs"])
    assert told["tokens"] == ["<bos>", "h", "i"]
    assert told["token_logprobs"] == [None, -10, -11]
    assert told["text_offset"] == [0, 0, 1]
    if not stream:
        assert reply.json["usage"]["completion_tokens"] == 0


async def test_nothing_at_all_is_refused(serve: Serve) -> None:
    reply = await post(serve(FakeEngine()), URL, {"prompt": "hi", "max_tokens": 0})
    assert (reply.status, reply.error["param"]) == (400, "max_tokens")


async def test_an_echo_asked_for_twice_is_the_same(serve: Serve) -> None:
    app = serve(FakeEngine(Script.say("ab", cached_tokens=0)))
    request = {"prompt": "hi", "echo": True, "logprobs": 3, "max_tokens": 1, "prompt_logprobs": 2}
    first, second = [(await post(app, URL, request)).json for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert first["usage"] == second["usage"]


async def test_offsets_go_on_behind_the_prompt(serve: Serve) -> None:
    request = {"prompt": "é<bos>x", "echo": True, "logprobs": 0}
    reply = await post(serve(FakeEngine(Script.say("y"))), URL, request)
    choice = reply.json["choices"][0]
    told = choice["logprobs"]
    assert choice["text"] == "é<bos>xy"
    assert told["tokens"] == ["<bos>", "bytes:\\xc3", "bytes:\\xa9", "<bos>", "x", "y", "<eos>"]
    assert told["text_offset"] == [0, 0, 0, 1, 6, 7, 8]


async def test_without_logprobs_the_prompt_is_not_scored(serve: Serve) -> None:
    engine = FakeEngine()
    await post(serve(engine), URL, {"prompt": "hi", "echo": True})
    assert engine.requests[0].sampling.num_prompt_logprobs is None


async def test_a_chat_echoes_what_it_continues(serve: Serve) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one t"}]
    request = {"messages": messages, "continue_final_message": True, "echo": True}
    engine = FakeEngine(Script.say("wo"))
    reply = await post(serve(engine), CHAT, request)
    assert reply.json["choices"][0]["message"]["content"] == "one two"
    assert engine.prompts == [(BOS, *ids("[user]hi[assistant]one t"))]
    reply = await post(serve(engine), CHAT, {**request, "logprobs": True})
    told = reply.json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in told] == ["w", "o", "<eos>"]


async def test_a_chat_does_not_echo_the_users_message(serve: Serve) -> None:
    request = {"messages": [{"role": "user", "content": "hi"}], "echo": True}
    reply = await post(serve(FakeEngine()), CHAT, request)
    assert reply.json["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"truncate_prompt_tokens": 3}, ids("fgh")),
        ({"truncate_prompt_tokens": 9}, (BOS, *ids("abcdefgh"))),
        ({"truncate_prompt_tokens": 100}, (BOS, *ids("abcdefgh"))),
        ({"truncate_prompt_tokens": None}, (BOS, *ids("abcdefgh"))),
        ({"truncate_prompt_tokens": -1}, (BOS, *ids("abcdefgh"))),
        ({"truncate_prompt_tokens": -1, "max_tokens": 995}, ids("defgh")),
        ({"truncate_prompt_tokens": 3, "prompt": [70, 71, 72, 73]}, (71, 72, 73)),
    ],
)
async def test_truncated_prompts(
    serve: Serve, fields: dict[str, object], prompt: tuple[int, ...]
) -> None:
    engine = FakeEngine()
    reply = await post(serve(engine), URL, {"prompt": "abcdefgh", **fields})
    assert engine.prompts == [prompt]
    assert reply.json["usage"]["prompt_tokens"] == len(prompt)


async def test_what_is_left_of_a_long_prompt_has_room_for_an_answer(serve: Serve) -> None:
    engine = FakeEngine()
    await post(serve(engine), URL, {"prompt": "x" * 5000, "truncate_prompt_tokens": -1})
    request = engine.requests[0]
    assert (len(request.prompt_ids), request.sampling.max_tokens) == (984, 16)


async def test_truncated_chat(serve: Serve) -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": "hi"}]
    await post(serve(engine), CHAT, {"messages": messages, "truncate_prompt_tokens": 7})
    assert engine.prompts == [ids("[model]")]


async def test_an_echo_of_a_truncated_prompt(serve: Serve) -> None:
    request = {"prompt": "abé", "truncate_prompt_tokens": 3, "echo": True, "logprobs": 0}
    reply = await post(serve(FakeEngine(Script.say("!"))), URL, request)
    choice = reply.json["choices"][0]
    assert choice["text"] == "bé!"
    assert choice["logprobs"]["tokens"] == ["b", "bytes:\\xc3", "bytes:\\xa9", "!", "<eos>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("value", [0, -2, 1.5, "3", True])
async def test_bad_truncation(serve: Serve, value: object) -> None:
    reply = await post(serve(FakeEngine()), URL, {"prompt": "a", "truncate_prompt_tokens": value})
    assert (reply.status, reply.error["param"]) == (400, "truncate_prompt_tokens")
