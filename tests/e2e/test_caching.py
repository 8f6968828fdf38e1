"""The cache as a client meets it: an agent's loop, and what can be asked of it and dropped."""

from typing import Any

import httpx
import openai
import pytest

from jaxserve.text.tokenizer import Tokenizer
from tests.e2e.conftest import MODEL, Setup
from tests.e2e.server import ServerProcess

pytestmark = pytest.mark.timeout(300)  # the first test waits for the compiler


def post(server: ServerProcess, path: str, body: object) -> Any:
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("stream", [False, True])
def test_an_agents_turn_computes_its_own_tokens_only(
    server: ServerProcess, setup: Setup, stream: bool
) -> None:
    """At a high temperature, so that hardly a turn is tokenized as it was generated."""
    tokenizer = Tokenizer.load(setup.checkpoint)
    letters = [i for i, piece in tokenizer.pieces.items() if str(piece).isalpha()]
    words = [i for i in letters if i not in tokenizer.special_ids]
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 40,
        "temperature": 2.0,
        "seed": 5,
        "extra_body": {
            "allowed_token_ids": words,
            "cache_salt": f"agent {stream}",
            "return_token_ids": True,
        },
    }
    messages: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
    num_known = num_unusual = 0
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        create: Any = client.chat.completions.create
        for turn in range(5):
            text, ids = "", list[int]()
            if stream:
                usage_too = {"include_usage": True}
                for chunk in create(
                    messages=messages, stream=True, stream_options=usage_too, **options
                ):
                    last = chunk
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        ids += getattr(choice, "token_ids", None) or []
            else:
                last = create(messages=messages, **options)
                text, ids = last.choices[0].message.content, last.choices[0].token_ids
            assert len(ids) == 40
            num_cached = last.usage.prompt_tokens_details.cached_tokens
            # All of the last turn but its last token, which was not computed then.
            assert num_cached == max(num_known - 1, 0), turn
            timings = last.timings
            assert timings["cache_n"] == num_cached
            assert timings["prompt_n"] == last.usage.prompt_tokens - num_cached
            assert timings["predicted_n"] == 40
            assert all(value is None or value >= 0 for value in timings.values())
            num_known = last.usage.prompt_tokens + len(ids)
            num_unusual += ids != tokenizer.encode(text, add_special_tokens=False)
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"And then? {turn}"},
            ]
    assert num_unusual >= 3


def test_what_is_cached_can_be_explained_and_dropped(server: ServerProcess) -> None:
    def explain(prompt: str) -> Any:
        return post(server, "/v1/cache/explain", {"prompt": prompt})

    story = "It was a dark and stormy night, and the rain fell in torrents. " * 4
    mine = {"prompt": story + "One", "max_tokens": 1, "prompt_cache_key": "mine"}
    post(server, "/v1/completions", mine)
    post(server, "/v1/completions", {**mine, "prompt": story + "Two", "prompt_cache_key": "other"})

    known = explain(story + "One")
    assert known["matched_tokens"] == known["prompt_tokens"]
    assert known["first_difference"] is None
    other = explain(story + "Three")
    assert 0 < other["matched_tokens"] < other["prompt_tokens"]
    difference = other["first_difference"]
    assert difference["position"] == other["matched_tokens"]
    assert "in torrents." in difference["context_before"]
    assert difference["text"] not in [each["text"] for each in difference["cached_alternatives"]]

    assert post(server, "/v1/cache/release", {"session": "mine"})["pages"] > 0
    assert 0 < explain(story + "One")["matched_tokens"] < known["prompt_tokens"]
    assert explain(story + "Two")["first_difference"] is None
    assert post(server, "/v1/cache/flush", {})["pages"] > 0
    assert explain(story + "Two")["matched_tokens"] == 0
    answer = post(server, "/v1/completions", {**mine, "prompt": story + "Two"})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
