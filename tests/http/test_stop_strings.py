import pytest

from tests.fake_engine import EOS, FakeEngine, Script, ids
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
