import json

import pytest

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.openai.responses import Answer, ChatAnswer, CompletionAnswer, error_body
from jaxserve.openai.usage import Timings, Usage


def answer(kind: type[Answer], *, token_ids: bool = False) -> Answer:
    return kind(
        request_id='x"y', created=1, model="m", prompts=[(2, 3)], n=2, return_token_ids=token_ids
    )


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_text_chunk_is_the_object_it_stands_for(
    kind: type[Answer],
) -> None:
    text = 'a"\\\n\u2028é🙂'
    frame = answer(kind, token_ids=True).text_chunk(1, text, (5, 6))
    chunk = json.loads(frame.removeprefix(b"data: ").removesuffix(b"\n\n"))
    body = {"delta": {"content": text}} if kind is ChatAnswer else {"text": text}
    assert chunk == {
        "object": kind.chunk_object,
        "id": kind.id_prefix + 'x"y',
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 1, **body, "logprobs": None, "finish_reason": None, "token_ids": [5, 6]}
        ],
    }


def test_no_chunk_where_there_is_nothing_to_carry() -> None:
    assert answer(ChatAnswer).text_chunk(0, "", (5,)) == b""
    assert answer(ChatAnswer, token_ids=True).text_chunk(0, "", ()) == b""
    assert answer(ChatAnswer, token_ids=True).text_chunk(0, "", (5,)) != b""


def test_usage() -> None:
    usage = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=2).to_wire()
    assert usage["total_tokens"] == 12
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_timings() -> None:
    timings = Timings(
        queue_s=0.0105,
        prompt_s=0.5,
        predicted_s=2.0,
        num_cached=7,
        num_prompt=100,
        num_predicted=8,
        num_forced=3,
        grammar_path="device",
    )
    assert timings.to_wire() == {
        "queue_ms": 10.5,
        "cache_n": 7,
        "prompt_n": 100,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": 5.0,
        "prompt_per_second": 200.0,
        "predicted_n": 8,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 250.0,
        "predicted_per_second": 4.0,
        "forced_n": 3,
        "grammar_path": "device",
    }


def test_what_took_no_time_has_no_rate() -> None:
    timings = Timings(
        queue_s=0, prompt_s=0.5, predicted_s=0, num_cached=0, num_prompt=0, num_predicted=1
    ).to_wire()
    assert timings["predicted_per_second"] is None
    assert timings["prompt_per_token_ms"] is None


def test_a_refusal_quotes_no_more_than_a_piece_of_the_request() -> None:
    error = InvalidRequestError("x" * 10**6, param="y" * 10**6)
    assert len(error_body(error)) < 3000


def test_any_message_is_told() -> None:
    error = json.loads(error_body(InvalidRequestError("a\ud800é", param="b\udfff")))["error"]
    assert (error["message"], error["param"]) == ("a?é", "b?")


def test_error_body() -> None:
    assert json.loads(error_body(ContextLengthError("too long", param="messages"))) == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
