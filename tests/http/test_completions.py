from dataclasses import replace

import pytest

from jaxserve.http.app import build_app
from jaxserve.http.config import HttpConfig
from jaxserve.http.served_model import ServedModel
from jaxserve.metrics import Metrics
from tests.fake_engine import BOS, EOS, IMAGE, VOCAB_SIZE, FakeEngine, Script, ids
from tests.http.conftest import Serve
from tests.http.driver import post

URL = "/v1/completions"


@pytest.mark.parametrize(
    ("request_fields", "prompts"),
    [
        ({"prompt": "hi"}, [(BOS, *ids("hi"))]),
        ({"prompt": ["a", "b"]}, [(BOS, *ids("a")), (BOS, *ids("b"))]),
        ({"prompt": [70, 71]}, [(70, 71)]),
        ({"prompt": [[70], [BOS, 71]]}, [(70,), (BOS, 71)]),
        ({"prompt": "<bos>hi"}, [(BOS, *ids("hi"))]),
        ({"prompt": ""}, [(BOS,)]),
        ({"prompt": "hi", "add_special_tokens": False}, [ids("hi")]),
    ],
)
async def test_prompt_forms(
    serve: Serve, request_fields: dict[str, object], prompts: list[tuple[int, ...]]
) -> None:
    engine = FakeEngine()
    reply = await post(serve(engine), URL, request_fields)
    assert reply.status == 200
    assert engine.prompts == prompts


async def test_a_token_that_only_the_tokenizer_knows_is_refused(model: ServedModel) -> None:
    small = replace(model, vocab_size=VOCAB_SIZE - 1)
    app = build_app(FakeEngine(), lambda: small, config=HttpConfig(), metrics=Metrics())
    reply = await post(app, URL, {"prompt": [BOS, VOCAB_SIZE - 1]})
    assert reply.status == 400
    assert reply.json["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("request_fields", "param"),
    [
        ({"prompt": "hi", "stop": "a" * 1025}, "stop"),
        ({"prompt": ["a"] * 1025}, "prompt"),
    ],
)
async def test_what_would_hold_the_loop_up_is_refused(
    serve: Serve, request_fields: dict[str, object], param: str
) -> None:
    reply = await post(serve(FakeEngine()), URL, request_fields)
    assert reply.status == 400
    assert reply.json["error"]["param"] == param


async def test_whole_answer(serve: Serve) -> None:
    reply = await post(serve(FakeEngine(Script.say("yes"))), URL, {"prompt": "hi"})
    answer = reply.json
    assert answer.pop("id") == f"cmpl-{reply.headers['x-request-id']}"
    assert isinstance(answer.pop("created"), int)
    assert answer.pop("timings")["predicted_n"] == answer["usage"]["completion_tokens"]
    assert answer == {
        "object": "text_completion",
        "model": "org/byte-model",
        "choices": [
            {
                "index": 0,
                "text": "yes",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_choices_are_prompt_major(serve: Serve) -> None:
    engine = FakeEngine(*(Script.say(text) for text in ("a0", "a1", "b0", "b1")))
    request = {"prompt": ["a", "bb"], "n": 2, "seed": 5, "return_token_ids": True}
    answer = (await post(serve(engine), URL, request)).json
    assert [choice["text"] for choice in answer["choices"]] == ["a0", "a1", "b0", "b1"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][1]["prompt_token_ids"] == [BOS, *ids("a")]
    assert answer["choices"][2]["prompt_token_ids"] == [BOS, *ids("bb")]
    assert answer["choices"][3]["token_ids"] == [*ids("b1"), EOS]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 12


async def test_a_prompt_answers_alike_wherever_it_stands(serve: Serve) -> None:
    engine = FakeEngine()
    await post(serve(engine), URL, {"prompt": ["a", "b"], "n": 2, "seed": 5})
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[:2] == seeds[2:]


async def test_default_budget(serve: Serve) -> None:
    engine = FakeEngine()
    await post(serve(engine), URL, {"prompt": ["a", [70] * 990]})
    assert [request.sampling.max_tokens for request in engine.requests] == [16, 10]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([IMAGE], "prompt"),
        (["a", "b<image>"], "prompt[1]"),
        ([VOCAB_SIZE], "prompt"),
        ([[70], [70, VOCAB_SIZE]], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([70, True], "prompt[1]"),
        ([70, "a"], "prompt[1]"),
        (["a", 70], "prompt[1]"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ({"a": 1}, "prompt"),
        (None, "prompt"),
    ],
)
async def test_bad_prompts(serve: Serve, prompt: object, param: str) -> None:
    engine = FakeEngine()
    reply = await post(serve(engine), URL, {"prompt": prompt})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert not engine.requests


async def test_empty_prompt_without_bos(serve: Serve) -> None:
    reply = await post(serve(FakeEngine()), URL, {"prompt": "", "add_special_tokens": False})
    assert (reply.status, reply.error["param"]) == (400, "prompt")


async def test_too_many_sequences(serve: Serve) -> None:
    reply = await post(serve(FakeEngine()), URL, {"prompt": ["a", "b"], "n": 65})
    assert (reply.status, reply.error["param"]) == (400, "n")


async def test_budget_may_fill_the_context_and_no_more(serve: Serve) -> None:
    engine = FakeEngine()
    app = serve(engine)
    assert (await post(app, URL, {"prompt": "hi", "max_tokens": 997})).status == 200
    reply = await post(app, URL, {"prompt": "hi", "max_tokens": 998})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "3 tokens" in reply.error["message"]
    assert "1000 tokens" in reply.error["message"]
    reply = await post(app, URL, {"prompt": [70] * 1000})
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
