"""A thought that the server closes, by the real engine: what follows is what would follow."""

from typing import Any

import httpx
import pytest

from tests.e2e.server import ServerProcess

pytestmark = pytest.mark.timeout(300)

START, END, NEWLINE = 100, 101, 107


def ask(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_a_budget_of_thoughts(server: ServerProcess) -> None:
    # Nothing but the opening marker is likely, until it is banned behind the thought.
    request = {
        "messages": [{"role": "user", "content": "Tell me of the sea."}],
        "logit_bias": {str(START): 100},
        "thinking_token_budget": 5,
        "max_tokens": 30,
        "ignore_eos": True,
        "temperature": 1,
        "seed": 7,
        "return_token_ids": True,
    }
    answer = ask(server, "/v1/chat/completions", request)
    ids = answer["choices"][0]["token_ids"]
    thought = [*[START] * 6, NEWLINE, END]
    assert ids[:8] == thought
    assert len(ids) == 30
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}

    expected = ask(
        server,
        "/v1/completions",
        {
            "prompt": [*answer["prompt_token_ids"], *thought],
            "logit_bias": {str(START): -100},
            "max_tokens": 22,
            "ignore_eos": True,
            "temperature": 1,
            "seed": 7,
            "return_token_ids": True,
        },
    )
    assert ids[8:] == expected["choices"][0]["token_ids"]
    assert START not in ids[8:]
