import pytest

from tests.fake_engine import END_OF_TURN, EOS, FakeEngine, Script, ids
from tests.http.conftest import Serve
from tests.http.driver import post

URL = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_over_tokens_ends_and_aborts(serve: Serve, stream: bool) -> None:
    steps = (ids("a <"), ids("EN"), ids("D>x"), ids("more"))
    engine = FakeEngine(Script(steps=steps, end=None))
    request = {"prompt": "hi", "stop": "<END>", "stream": stream, "return_token_ids": True}
    reply = await post(serve(engine), URL, request)
    answers = reply.chunks if stream else [reply.json]
    choices = [answer["choices"][0] for answer in answers]
    assert "".join(choice["text"] for choice in choices) == "a "
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "<END>"
    token_ids = [i for choice in choices for i in choice.get("token_ids", [])]
    assert token_ids == [*ids("a <END>")]
    assert engine.abort_reasons == ["stop"]


async def test_usage_counts_up_to_the_completing_token(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids("ab##"), ids("cd")), end=None, cached_tokens=2))
    reply = await post(serve(engine), URL, {"prompt": "hi", "stop": ["#"]})
    assert reply.json["usage"]["completion_tokens"] == 3
    assert reply.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_almost_a_stop_string_is_given_back(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids("a <"), ids("EN"), ids("Q"), ids("<E"), (EOS,))))
    reply = await post(serve(engine), URL, {"prompt": "hi", "stop": ["<END>"]})
    assert reply.json["choices"][0]["text"] == "a <ENQ<E"
    assert reply.json["choices"][0]["stop_reason"] is None
    assert not engine.aborted


async def test_stop_string_in_the_last_step_before_the_budget(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids("a#"),), end="length"))
    reply = await post(serve(engine), URL, {"prompt": "hi", "stop": ["#"]})
    assert reply.json["choices"][0]["finish_reason"] == "stop"


async def test_stop_string_that_the_end_completes(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids(b"a\xc3"),), end="length"))
    reply = await post(serve(engine), URL, {"prompt": "hi", "stop": ["\ufffd"]})
    choice = reply.json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "a",
        "stop",
        "\ufffd",
    )


async def test_prompt_does_not_help_to_complete_a_stop_string(serve: Serve) -> None:
    engine = FakeEngine(Script.say("D>x"))
    reply = await post(serve(engine), URL, {"prompt": "<EN", "stop": ["<END>"]})
    assert reply.json["choices"][0]["text"] == "D>x"


async def test_other_choices_go_on(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids("a#b"),), end=None), Script.say("long answer"))
    reply = await post(serve(engine), URL, {"prompt": "hi", "stop": ["#"], "n": 2})
    assert [choice["text"] for choice in reply.json["choices"]] == ["a", "long answer"]


async def test_stop_string_that_begins_before_min_tokens(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids("a#"), ids("#b")), end=None))
    request = {"prompt": "hi", "stop": "##", "min_tokens": 2, "return_token_ids": True}
    choice = (await post(serve(engine), URL, request)).json["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("a", "##")
    assert choice["token_ids"] == [*ids("a##")]


async def test_stop_string_that_ends_before_min_tokens_is_text(serve: Serve) -> None:
    engine = FakeEngine(Script(steps=(ids("a##"), ids("b##c")), end=None))
    request = {"prompt": "hi", "stop": "##", "min_tokens": 3, "return_token_ids": True}
    choice = (await post(serve(engine), URL, request)).json["choices"][0]
    assert choice["text"] == "a##b"
    assert choice["token_ids"] == [*ids("a##b##")]


@pytest.mark.parametrize(("stop", "text"), [(["<END>"], "a <END>"), (["x", "END", "D"], "a <END")])
async def test_stop_string_may_stay(serve: Serve, stop: list[str], text: str) -> None:
    engine = FakeEngine(Script(steps=(ids("a <"), ids("EN"), ids("D>x")), end=None))
    request = {"prompt": "hi", "stop": stop, "include_stop_str_in_output": True}
    choice = (await post(serve(engine), URL, request)).json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize(
    ("include", "skip", "text"),
    [(False, False, "a"), (False, True, "a"), (True, True, "a"), (True, False, "a<end>")],
)
async def test_text_of_an_end_id(serve: Serve, include: bool, skip: bool, text: str) -> None:
    engine = FakeEngine(Script(steps=(ids("a"), (END_OF_TURN,))))
    request = {
        "prompt": "hi",
        "include_stop_str_in_output": include,
        "skip_special_tokens": skip,
    }
    choice = (await post(serve(engine), URL, request)).json["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (text, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "end_id", "reason"),
    [
        ({"stop_token_ids": [*ids("b")]}, ids("b")[0], ids("b")[0]),
        ({"stop_token_ids": [*ids("b")]}, EOS, None),
        ({"stop_token_ids": [EOS]}, EOS, None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS, EOS),
    ],
)
async def test_stop_ids_of_the_request(
    serve: Serve, stream: bool, fields: dict[str, object], end_id: int, reason: int | None
) -> None:
    engine = FakeEngine(Script(steps=(ids("a"), (end_id,))))
    reply = await post(serve(engine), URL, {"prompt": "hi", "stream": stream, **fields})
    choice = (reply.chunks[-1] if stream else reply.json)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
    stops = engine.requests[0].sampling.stop_token_ids
    assert end_id in stops
    assert (END_OF_TURN in stops) == ("ignore_eos" not in fields)
