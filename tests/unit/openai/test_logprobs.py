"""What a writer makes of scored tokens that are out of the ordinary."""

import json
from typing import Any

import orjson

from jaxserve.openai.logprobs import (
    LogprobsWriter,
    ScoredToken,
    chat_logprobs,
    completion_logprobs,
)
from jaxserve.types import TokenLogprobs

FLOOR = -9999.0
"""What the device gives where a probability is zero."""


class Spelling:
    """Ids 1 and 2 are spelled alike, 3 is a byte, all others are unknown."""

    def piece(self, token_id: int) -> str | int:
        pieces: dict[int, str | int] = {1: "a", 2: "a", 3: 0xFF}
        return pieces.get(token_id, "")


WRITER = LogprobsWriter(spelling=Spelling(), as_ids=False)
AS_IDS = LogprobsWriter(spelling=Spelling(), as_ids=True)


def token(token_id: int, logprob: float, *top: tuple[int, float]) -> ScoredToken:
    scored = TokenLogprobs(token_id, logprob, 9, tuple(i for i, _ in top), tuple(p for _, p in top))
    return ScoredToken(token_id=token_id, offset=0, scored=scored)


def chat(*parts: list[ScoredToken]) -> Any:
    return json.loads(orjson.dumps(chat_logprobs([WRITER.chat(part) for part in parts])))


def completion(*parts: list[ScoredToken], writer: LogprobsWriter = WRITER) -> Any:
    columns = [writer.completion(part, 2) for part in parts]
    return json.loads(orjson.dumps(completion_logprobs(columns)))


def test_the_least_there_is_stays_a_number() -> None:
    tokens = [token(3, FLOOR, (1, 0.0), (7, FLOOR))]
    assert chat(tokens)["content"][0]["logprob"] == FLOOR
    assert completion(tokens)["token_logprobs"] == [FLOOR]
    scored = [each.scored for each in tokens if each.scored]
    [first, entry] = json.loads(orjson.dumps(WRITER.prompt(scored, 2)))
    assert first is None
    assert entry["3"] == {"logprob": FLOOR, "rank": 9, "decoded_token": "bytes:\\xff"}


def test_of_two_spelled_alike_the_tokens_own_counts() -> None:
    tokens = [token(2, -3.0, (1, -1.0), (3, -2.0))]
    assert completion(tokens)["top_logprobs"] == [{"a": -3.0, "bytes:\\xff": -2.0}]
    told = completion(tokens, writer=AS_IDS)
    assert told["top_logprobs"] == [{"token_id:1": -1.0, "token_id:3": -2.0, "token_id:2": -3.0}]


def test_an_unknown_id_has_no_text() -> None:
    [content] = [chat([token(99, -1.0)])["content"]]
    assert content == [{"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": []}]


def test_parts_become_one() -> None:
    one, two = token(1, -1.0), token(3, -2.0)
    assert completion([one], [], [two]) == completion([one, two])
    assert chat([one], [], [two]) == chat([one, two])


def test_nothing_at_all() -> None:
    assert chat() == chat([]) == {"content": [], "refusal": None}
    assert completion([]) == {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
    }  # fmt: skip
    assert json.loads(orjson.dumps(WRITER.prompt([], 2))) == [None]
