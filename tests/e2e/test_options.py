"""Every option, each with every other one: what the wire says is what the oracle works out.

The rows are all pairs of the options' levels. Of each row's request the tokens are checked against
the oracle's adjusted logits, by a twin that is unstreamed, alone and tells them; then the request
itself, streamed or not, alone or beside seven others, must say what follows from those tokens.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.checkpoints import END_TOKEN_IDS
from tests.e2e.conftest import Setup
from tests.e2e.expected import BOS, TURN_MARKERS, Expected, log_softmax
from tests.e2e.generated import CHAT, COMPLETIONS, TOKENIZE
from tests.e2e.pairwise import Row, all_pairs
from tests.e2e.server import ServerProcess, wait_until
from tests.e2e.wire import Connection, Reply, post

pytestmark = pytest.mark.timeout(300)

MAX_TOKENS = 14
SAMPLED = {"temperature": 1.3, "top_p": 0.9, "top_k": 30, "min_p": 0.02, "seed": 77}

FACTORS: dict[str, Sequence[object]] = {
    "endpoint": ("completions", "chat"),
    "prompt": ("text", "ids", "both"),
    "stream": (False, True),
    "company": (False, True),
    "n": (1, 3),
    "sampling": ("greedy", "seeded"),
    "penalty": (None, "presence", "frequency", "repetition"),
    "bias": (None, "force", "ban", "end"),
    "allowed": (False, True),
    "bad_words": (False, True),
    "stop": (None, "text", "id"),
    "include_stop": (False, True),
    "min_tokens": (0, 6),
    "ignore_eos": (False, True),
    "logprobs": (None, 0, 4, 20),
    "as_ids": (False, True),
    "prompt_logprobs": (None, 0, 3),
    "echo": (False, True),
    "truncate": (None, 3, -1),
    "return_ids": (False, True),
    "skip_special": (True, False),
    "usage": (None, "end", "continuous"),
}


def is_allowed(row: Row) -> bool:
    """Refuse what no request can ask for."""
    if row.get("endpoint") == "chat" and row.get("prompt", "text") != "text":
        return False
    scores_prompt = row.get("prompt_logprobs") is not None
    if scores_prompt and (row.get("stream") or row.get("usage") is not None):
        return False
    return row.get("stream", True) is True or row.get("usage") is None


ROWS = list(all_pairs(FACTORS, is_allowed=is_allowed))


@dataclass(slots=True)
class Told:
    """One choice, put together from an answer or a stream."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Answer:
    """All choices, and the usages that were told: one for each chunk where they come so."""

    choices: list[Told]
    usages: list[Any]
    num_chunks: int


@pytest.fixture(scope="session")
def expected(setup: Setup) -> Expected:
    return Expected(setup.checkpoint)


@pytest.mark.parametrize("row", ROWS, ids=[str(i) for i in range(len(ROWS))])
async def test_all_options_apply_together(
    server: ServerProcess, expected: Expected, row: Row
) -> None:
    case = Case(server, expected, row)
    await case.choose_words()
    twin = await case.twin()
    async with AsyncExitStack() as stack:
        if row["company"]:
            await stack.enter_async_context(company(server))
        answer = await ask(server, case.path, case.body)

    assert len(answer.choices) == len(case.prompts) * case.n
    for i, (told, plain) in enumerate(zip(answer.choices, twin.choices, strict=True)):
        case.check_twin(i, plain)
        case.check(i, told, plain)
    case.check_usage(answer, twin)


def test_the_rows_are_few_and_hold_every_pair() -> None:
    assert len(ROWS) < 40
    assert {(row["penalty"], row["logprobs"]) for row in ROWS} == {
        (penalty, logprobs) for penalty in FACTORS["penalty"] for logprobs in FACTORS["logprobs"]
    }


class Case:
    """One row's request, and what must come of it."""

    def __init__(self, server: ServerProcess, expected: Expected, row: Row) -> None:
        self._server = server
        self._expected = expected
        self._row = row
        self.n = int(str(row["n"]))
        self.is_chat = row["endpoint"] == "chat"
        self.path = CHAT if self.is_chat else COMPLETIONS
        self.body: dict[str, Any] = {
            "max_tokens": MAX_TOKENS,
            **(SAMPLED if row["sampling"] == "seeded" else {"temperature": 0}),
            **_options(row),
        }
        self.prompts: list[list[int]] = []
        self.echoes: list[str] = []

    async def choose_words(self) -> None:
        """Set the prompt, and options that need the model's own words to have an effect."""
        row, body, expected = self._row, self.body, self._expected
        await self._set_prompt()
        ids = (await self.twin()).choices[0].ids
        if row["bias"] == "ban":
            body["logit_bias"] = {str(ids[1]): -100}
        if row["bad_words"]:
            body["bad_words"] = [expected.decode(ids[2:4]).strip("\ufffd ") or "the"]
        if row["allowed"]:
            body["allowed_token_ids"] = sorted({*ids[::2], *range(500, 1000, 25), 1, 106})
        if row["stop"] is not None:
            choice = (await self.twin()).choices[0]
            if row["stop"] == "id":
                words = [i for i in choice.ids if i not in END_TOKEN_IDS]
                body["stop_token_ids"] = [*words[len(words) // 2 :][:1], 999]
            else:
                body["stop"] = expected.decode(choice.ids)[-4:-2].strip("\ufffd") or "e"

    async def twin(self) -> Answer:
        """Answer the same request alone, unstreamed, with its ids and without extras."""
        extras = ("stream", "stream_options", "prompt_logprobs", "echo", "logprobs", "top_logprobs")
        body = {key: value for key, value in self.body.items() if key not in extras}
        return await ask(self._server, self.path, {**body, "return_token_ids": True})

    async def _set_prompt(self) -> None:
        row, body = self._row, self.body
        texts: list[str | None] = ["The sea is one two"]
        if self.is_chat:
            messages = [{"role": "user", "content": "Tell me of the sea."}]
            texts = [""]
            if row["echo"]:
                messages.append({"role": "assistant", "content": "The sea"})
                body["continue_final_message"] = True
                texts = ["The sea"]
            body["messages"] = messages
            asked: dict[str, Any] = {"messages": messages, "continue_final_message": row["echo"]}
            reply = await call(self._server, TOKENIZE, asked)
            self.prompts = [reply.json()["tokens"]]
        else:
            text = str(texts[0])
            text_ids, ids = [BOS, *self._expected.encode(text)], [700, 800, 900, 2, 444]
            choose: dict[object, tuple[object, list[list[int]], list[str | None]]] = {
                "text": (text, [text_ids], [text]),
                "ids": (ids, [ids], [None]),
                "both": ([text, ids], [text_ids, ids], [text, None]),
            }
            body["prompt"], self.prompts, texts = choose[row["prompt"]]
        if row["truncate"] == 3:
            self.prompts = [ids[-3:] for ids in self.prompts]
            texts = texts if self.is_chat else [None for _ in texts]
        self.echoes = [
            self._expected.decode(ids, skip_special_tokens=bool(row["skip_special"]))
            if text is None
            else text
            for ids, text in zip(self.prompts, texts, strict=True)
        ]

    def check_twin(self, index: int, plain: Told) -> None:
        prompt = self.prompts[index // self.n]
        assert plain.prompt_ids == prompt
        self._expected.check_tokens(prompt, plain.ids, self.body)

    def check(self, index: int, told: Told, plain: Told) -> None:
        """Check a choice, given its tokens."""
        row, body = self._row, self.body
        end = self._expected.text(plain.ids, body)
        echo = self.echoes[index // self.n] if row["echo"] else ""
        # Where its markers come up, a chat's turn is more than its text.
        if not (self.is_chat and TURN_MARKERS.intersection(plain.ids)):
            assert told.text == echo + end.text
            assert plain.text == end.text
            assert (told.finish_reason, told.stop_reason) == (end.finish_reason, end.stop_reason)
        if row["return_ids"]:
            assert told.ids == plain.ids
            assert told.prompt_ids == plain.prompt_ids
        else:
            assert told.ids == []
            assert told.prompt_ids is None
        self._check_scores(index, told, plain, echo)

    def _check_scores(self, index: int, told: Told, plain: Told, echo: str) -> None:
        row, prompt, as_ids = self._row, self.prompts[index // self.n], bool(self._row["as_ids"])
        scores = log_softmax(self._expected.logits([*prompt, *plain.ids]))[:-1]
        answered = scores[len(prompt) - 1 :]
        if row["logprobs"] is None:
            assert told.logprobs is None
        elif self.is_chat:
            self._expected.check_chat_logprobs(
                told.logprobs, plain.ids, answered, int(str(row["logprobs"])), as_ids=as_ids
            )
        else:
            ids = [*prompt, *plain.ids] if row["echo"] else plain.ids
            rows = scores if row["echo"] else answered
            self._expected.check_completion_logprobs(
                told.logprobs, ids, rows, int(str(row["logprobs"])), as_ids=as_ids
            )
            assert told.logprobs["text_offset"][-len(plain.ids)] == len(echo)
        if row["prompt_logprobs"] is None:
            assert told.prompt_logprobs is None
        else:
            assert told.prompt_logprobs is not None
            self._expected.check_prompt_logprobs(
                told.prompt_logprobs, prompt, int(str(row["prompt_logprobs"]))
            )

    def check_usage(self, answer: Answer, twin: Answer) -> None:
        num_prompt = sum(len(prompt) for prompt in self.prompts)
        num_output = sum(len(choice.ids) for choice in twin.choices)
        counts = [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in answer.usages]
        if self._row["stream"] and self._row["usage"] is None:
            assert counts == []
            return
        assert counts[-1] == (num_prompt, num_output)
        assert counts == sorted(counts)
        is_continuous = self._row["usage"] == "continuous"
        assert len(counts) == (answer.num_chunks if is_continuous else 1)
        assert all(
            usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            for usage in answer.usages
        )


def _options(row: Row) -> dict[str, Any]:
    """Translate levels into fields, as far as these do not depend on the model's words."""
    penalties: dict[str, dict[str, Any]] = {
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": 1.9},
        "repetition": {"repetition_penalty": 1.8},
    }
    biases: dict[str, dict[str, Any]] = {
        "force": {"logit_bias": {"600": 100, "601": 99.5}},
        "end": {"logit_bias": {"1": 60}},
    }
    body: dict[str, Any] = {**penalties.get(str(row["penalty"]), {})}
    body |= biases.get(str(row["bias"]), {})
    for name, key in (
        ("n", "n"),
        ("stream", "stream"),
        ("include_stop", "include_stop_str_in_output"),
        ("min_tokens", "min_tokens"),
        ("ignore_eos", "ignore_eos"),
        ("as_ids", "return_tokens_as_token_ids"),
        ("prompt_logprobs", "prompt_logprobs"),
        ("echo", "echo"),
        ("truncate", "truncate_prompt_tokens"),
        ("return_ids", "return_token_ids"),
        ("skip_special", "skip_special_tokens"),
    ):
        if row[name] is not None:
            body[key] = row[name]
    if row["logprobs"] is not None and row["endpoint"] == "chat":
        body |= {"logprobs": True, "top_logprobs": row["logprobs"]}
    elif row["logprobs"] is not None:
        body["logprobs"] = row["logprobs"]
    if row["usage"] is not None:
        body["stream_options"] = {
            "include_usage": True,
            "continuous_usage_stats": row["usage"] == "continuous",
        }
    return body


# Asking


async def call(server: ServerProcess, path: str, body: dict[str, Any]) -> Reply:
    async with Connection(server.url) as connection, asyncio.timeout(100):
        reply = await connection.post(path, json.dumps(body).encode())
    assert reply is not None
    assert reply.status == 200, reply.body
    return reply


async def ask(server: ServerProcess, path: str, body: dict[str, Any]) -> Answer:
    reply = await call(server, path, body)
    return _from_stream(reply) if body.get("stream") else _from_whole(reply.json())


def _from_whole(answer: Any) -> Answer:
    choices = []
    for i, choice in enumerate(answer["choices"]):
        assert choice["index"] == i
        logprobs = choice["logprobs"]
        if "message" in choice and logprobs is not None:
            logprobs = logprobs["content"]
        choices.append(
            Told(
                text=choice["message"]["content"] if "message" in choice else choice["text"],
                ids=choice.get("token_ids", []),
                prompt_ids=choice.get("prompt_token_ids", answer.get("prompt_token_ids")),
                prompt_logprobs=choice.get("prompt_logprobs", answer.get("prompt_logprobs")),
                logprobs=logprobs,
                finish_reason=choice["finish_reason"],
                stop_reason=choice["stop_reason"],
            )
        )
    return Answer(choices, [answer["usage"]], 0)


def _from_stream(reply: Reply) -> Answer:
    *events, end = reply.events
    assert end == "[DONE]"
    chunks = [json.loads(event) for event in events]
    choices: dict[int, Told] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            told = choices.setdefault(choice["index"], Told())
            assert told.finish_reason is None  # nothing comes behind the end
            told.text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            told.ids += choice.get("token_ids", ())
            if (
                prompt := choice.get("prompt_token_ids", chunk.get("prompt_token_ids"))
            ) is not None:
                told.prompt_ids = prompt
            told.logprobs = _joined(told.logprobs, choice["logprobs"])
            told.finish_reason = choice["finish_reason"]
            told.stop_reason = choice.get("stop_reason")
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage") is not None]
    return Answer([choices[i] for i in sorted(choices)], usages, len(chunks))


def _joined(before: Any, more: Any) -> Any:
    if more is None:
        return before
    if "content" in more:
        return [*(before or []), *more["content"]]
    return {key: [*(before or {}).get(key, []), *values] for key, values in more.items()}


@asynccontextmanager
async def company(server: ServerProcess) -> AsyncIterator[None]:
    """Keep seven streams of all sorts running."""
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 2, "seed": 5},
        {"frequency_penalty": 2, "logprobs": 20},
        {"logit_bias": {"600": 100}, "top_k": 5},
        {"repetition_penalty": 3, "min_tokens": 300},
        {"bad_words": ["the", "a b"], "allowed_token_ids": list(range(200, 900))},
        {"presence_penalty": -2, "top_p": 0.3, "min_p": 0.2},
    ]
    async with AsyncExitStack() as stack:
        for i, option in enumerate(options):
            body = {"prompt": f"Rain {i}", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            connection = await stack.enter_async_context(Connection(server.url))
            await connection.send(post(COMPLETIONS, json.dumps({**body, **option}).encode()))
            assert (await connection.read_some()).startswith(b"HTTP/1.1 200")
        yield
        assert server.metric("jaxserve_num_requests_running") >= 1
    gauge = "jaxserve_num_requests_running"
    await asyncio.to_thread(wait_until, lambda: server.metric(gauge) == 0)


def test_nothing_is_compiled_or_kept(server: ServerProcess) -> None:
    assert server.metric("jaxserve_serving_compiles_total") == 0
    for gauge in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_pages_used",
        "kv_sliding_pages_used",
    ):
        assert server.metric(f"jaxserve_{gauge}") == 0
