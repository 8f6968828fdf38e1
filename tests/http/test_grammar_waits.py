"""Requests that wait for a grammar: how long, who leaves, and what is left behind."""

import asyncio
import threading
from typing import Any

import anyio.to_thread
import pytest
from starlette.applications import Starlette

from jaxserve.errors import OverloadedError
from jaxserve.guided.checking import TextChecker
from jaxserve.guided.tables import Grammar, GrammarSpec
from jaxserve.http.app import build_app
from jaxserve.http.aside import limiter
from jaxserve.http.config import HttpConfig
from jaxserve.http.layouts import Layouts
from jaxserve.http.served_model import ServedModel
from jaxserve.metrics import Metrics
from tests.fake_engine import FakeEngine
from tests.http.driver import open_post, post
from tests.http.inline_grammars import InlineCompiler, with_grammars
from tests.http.tool_requests import ASK, CHAT, FORCED, ONE, THINKING, USER

THOUGHTFUL = {"messages": [USER], **ONE, **THINKING, "thinking_token_budget": 3}


def serve(model: ServedModel) -> Starlette:
    model = with_grammars(model)
    return build_app(FakeEngine(), lambda: model, config=HttpConfig(), metrics=Metrics())


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the second compilation of a grammar, and all later ones, never end; return what asks."""
    asked: list[str] = []
    compile_inline = InlineCompiler.compile

    async def wait(self: InlineCompiler, spec: GrammarSpec) -> Grammar:
        asked.append("asked")
        if len(asked) > 1:
            try:
                await asyncio.Event().wait()
            finally:
                asked.append("left")
        return await compile_inline(self, spec)

    monkeypatch.setattr(InlineCompiler, "compile", wait)
    return asked


async def test_timeout_s_bounds_the_grammar_behind_a_thought(
    gemma4: ServedModel, stuck: list[str]
) -> None:
    app = serve(gemma4)
    reply = await post(app, CHAT, {**THOUGHTFUL, "timeout_s": 0.1})
    assert (reply.status, reply.error["code"]) == (503, "unavailable")


@pytest.mark.parametrize(
    ("url", "fields"),
    [(CHAT, ASK), (CHAT, THOUGHTFUL), ("/v1/grammar/check", ONE)],
    ids=["calls", "behind a thought", "check"],
)
async def test_one_who_goes_waits_for_no_grammar(
    gemma4: ServedModel, stuck: list[str], url: str, fields: dict[str, Any]
) -> None:
    if fields is not THOUGHTFUL:
        stuck.append("asked")  # also the first one never ends
    connection = open_post(serve(gemma4), url, fields)
    while len(stuck) < 2:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.005)
    connection.disconnect()
    await connection.finish()
    assert stuck == ["asked", "asked", "left"]


@pytest.mark.parametrize(
    "place", [(Layouts, "lay_out"), (TextChecker, "judge")], ids=["lay_out", "judge"]
)
async def test_one_who_goes_leaves_no_thread_uncounted(
    gemma4: ServedModel, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    work = getattr(*place)

    def wait(*arguments: Any) -> Any:
        begun.set()
        may_end.wait(timeout=30)
        return work(*arguments)

    monkeypatch.setattr(*place, wait)
    app = serve(gemma4)
    connection = open_post(app, "/v1/grammar/check", {**ONE, "texts": ["1"]})
    await asyncio.to_thread(begun.wait)
    connection.disconnect()
    await connection.finish()
    limiters = (anyio.to_thread.current_default_thread_limiter(), limiter(is_foreign=True))
    assert sum(each.borrowed_tokens for each in limiters) == 1
    may_end.set()


@pytest.mark.parametrize(
    "fields", [ASK, FORCED, {"messages": [USER], **ONE}], ids=["auto", "required", "schema"]
)
async def test_a_full_queue_of_grammars_refuses(
    gemma4: ServedModel, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    async def refuse(self: object, spec: GrammarSpec) -> Grammar:
        raise OverloadedError("64 grammars wait to be compiled", retry_after_s=7)

    monkeypatch.setattr(InlineCompiler, "compile", refuse)
    reply = await post(serve(gemma4), CHAT, fields)
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    assert reply.headers["retry-after"] == "7"
