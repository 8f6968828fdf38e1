"""What a text or a conversation is to the model: tokenize, detokenize, render; the version."""

import asyncio
import threading
from typing import Any

import pytest

import jaxserve
from jaxserve.engine.client import EngineStatus
from jaxserve.http import aside
from jaxserve.http.config import HttpConfig
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from tests.fake_engine import BOS, EOS, IMAGE, VOCAB_SIZE, FakeEngine, ids
from tests.http.conftest import Serve
from tests.http.driver import Connection, get, open_post, post

TRUSTING = HttpConfig(trust_request_chat_template=True)
RENDER = "/v1/chat/completions/render"
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yé"}]


async def ask(
    serve: Serve, path: str, config: HttpConfig | None = None, **fields: Any
) -> Connection:
    return await post(serve(FakeEngine(), config), path, fields)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": "h é"}, [BOS, *ids("h é")]),
        ({"prompt": ""}, [BOS]),
        ({"prompt": "<bos>h<eos>"}, [BOS, *ids("h"), EOS]),
        ({"prompt": "h", "add_special_tokens": False}, [*ids("h")]),
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"prompt": "x" * 3000, "model": "org/byte-model"}, [BOS, *ids("x" * 3000)]),
    ],
)
async def test_a_text(serve: Serve, fields: dict[str, Any], tokens: list[int]) -> None:
    reply = await ask(serve, "/tokenize", **fields)
    assert reply.status == 200
    assert reply.json == {
        "count": len(tokens),
        "max_model_len": 1000,
        "tokens": tokens,
        "token_strs": None,
    }


async def test_spellings(serve: Serve) -> None:
    reply = await ask(serve, "/tokenize", prompt="a é", return_token_strs=True)
    assert reply.json["token_strs"] == ["<bos>", "a", "▁", "<0xC3>", "<0xA9>"]


async def test_many_spellings_are_told_aside(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    spell = Tokenizer.id_to_token

    def note(self: Tokenizer, token_id: int) -> str | None:
        threads.add(threading.current_thread())
        return spell(self, token_id)

    monkeypatch.setattr(Tokenizer, "id_to_token", note)
    reply = await ask(serve, "/tokenize", prompt="a" * 3000, return_token_strs=True)
    assert reply.json["token_strs"] == ["<bos>", *"a" * 3000]
    assert len(threads) == 1
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "[user]hi[assistant]yé[model]"),
        ({"add_generation_prompt": True}, "[user]hi[assistant]yé[model]"),
        ({"add_generation_prompt": False}, "[user]hi[assistant]yé"),
        ({"continue_final_message": True}, "[user]hi[assistant]yé"),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            "[user]hi[assistant]yé",
        ),
        ({"add_special_tokens": True}, "[user]hi[assistant]yé[model]"),
        ({"add_special_tokens": False}, "[user]hi[assistant]yé[model]"),
        ({"chat_template_kwargs": {"unused": [1]}}, "[user]hi[assistant]yé[model]"),
    ],
)
async def test_a_conversation(serve: Serve, fields: dict[str, Any], text: str) -> None:
    tokens = [BOS, *ids(text)]
    reply = await ask(serve, "/tokenize", messages=TALK, **fields)
    assert (reply.json["tokens"], reply.json["count"]) == (tokens, len(tokens))
    reply = await ask(serve, RENDER, messages=TALK, **fields)
    assert reply.json == {"prompt": f"<bos>{text}", "token_ids": tokens}
    engine = FakeEngine()
    await post(serve(engine), "/v1/chat/completions", {"messages": TALK, **fields})
    assert engine.prompts == [tuple(tokens)]


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"tokens": [BOS, *ids("h é"), EOS]}, "<bos>h é<eos>"),
        ({"tokens": []}, ""),
        ({"tokens": [*ids(b"\xc3")]}, "\ufffd"),
        ({"tokens": [*ids("x" * 3000)]}, "x" * 3000),
        ({"tokens": [*ids("a")], "model": "org/byte-model"}, "a"),
    ],
)
async def test_ids(serve: Serve, fields: dict[str, Any], tokens: str) -> None:
    reply = await ask(serve, "/detokenize", **fields)
    assert (reply.status, reply.json) == (200, {"prompt": tokens})


@pytest.mark.parametrize("text", ["", "a b", "é✓🙂\n\x00", "<bos>x<eos>"])
async def test_there_and_back(serve: Serve, text: str) -> None:
    tokens = (await ask(serve, "/tokenize", prompt=text, add_special_tokens=False)).json["tokens"]
    assert (await ask(serve, "/detokenize", tokens=tokens)).json == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": TALK}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": None}, "messages"),
        ("/tokenize", {"messages": TALK, "tools": [{}]}, "tools[0].function"),
        (
            "/tokenize",
            {"messages": TALK, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 2.0]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [10**12]}, "tokens[0]"),
        (RENDER, {}, "messages"),
        (RENDER, {"messages": TALK, "temperature": 5}, "temperature"),
        (RENDER, {"messages": TALK, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": TALK, "chat_template": "x"}, "chat_template"),
        ("/v1/chat/completions", {"messages": TALK, "chat_template": "x"}, "chat_template"),
    ],
)
async def test_refusals(serve: Serve, path: str, fields: dict[str, Any], param: str) -> None:
    reply = await ask(serve, path, **fields)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", RENDER])
async def test_another_model_is_unknown(serve: Serve, path: str) -> None:
    fields: dict[str, Any] = {"messages": TALK} if path != "/detokenize" else {"tokens": [1]}
    reply = await ask(serve, path, **fields, model="other")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/tokenize", RENDER, "/v1/chat/completions"])
async def test_a_template_of_the_requests_own(serve: Serve, path: str) -> None:
    fields = {
        "messages": TALK,
        "chat_template": "{{ bos_token }}{{ who }}:{{ messages | length }}",
        "chat_template_kwargs": {"who": "me"},
    }
    engine = FakeEngine()
    reply = await post(serve(engine, TRUSTING), path, fields)
    assert reply.status == 200
    tokens = [BOS, *ids("me:2")]
    told = {"/tokenize": "tokens", RENDER: "token_ids"}
    assert (reply.json[told[path]] if path in told else list(engine.prompts[0])) == tokens


@pytest.mark.parametrize("template", [r'{{ "\ud800" }}', "{% if %}", "{{ raise_exception('no') }}"])
async def test_a_bad_template_is_the_clients_fault(serve: Serve, template: str) -> None:
    reply = await ask(serve, RENDER, TRUSTING, messages=TALK, chat_template=template)
    assert (reply.status, reply.error["param"]) == (400, "chat_template")


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"],
)
async def test_variables_do_not_stand_for_fields(serve: Serve, name: str) -> None:
    reply = await ask(serve, RENDER, messages=TALK, chat_template_kwargs={name: []})
    assert (reply.status, reply.error["param"]) == (400, f"chat_template_kwargs.{name}")


async def test_variables_are_nested_within_limits(serve: Serve) -> None:
    value: Any = 1
    for _ in range(63):
        value = [value]
    fields: dict[str, Any] = {"messages": TALK, "chat_template_kwargs": {"a": value}}
    assert (await ask(serve, RENDER, **fields)).status == 200
    fields["chat_template_kwargs"] = {"a": [value]}
    reply = await ask(serve, RENDER, **fields)
    assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")
    assert "64 levels" in reply.error["message"]


async def test_what_is_left_of_a_cut_prompt_is_rendered(serve: Serve) -> None:
    reply = await ask(serve, RENDER, messages=TALK, truncate_prompt_tokens=8)
    assert reply.json == {"prompt": "\ufffd[model]", "token_ids": [*ids("é[model]")][1:]}


async def test_they_need_the_model_but_no_engine(serve: Serve) -> None:
    app = serve(FakeEngine(status=EngineStatus(phase="draining")))
    assert (await post(app, "/tokenize", {"prompt": "a"})).status == 200
    assert (await post(app, "/detokenize", {"tokens": [BOS, IMAGE]})).status == 200
    assert (await post(app, RENDER, {"messages": TALK})).status == 200


async def test_version(serve: Serve) -> None:
    assert (await get(serve(FakeEngine()), "/version")).json == {"version": jaxserve.__version__}


async def test_a_template_may_say_anything_when_it_refuses(serve: Serve) -> None:
    template = r"{{ raise_exception('a\ud800') }}"
    reply = await ask(serve, RENDER, TRUSTING, messages=TALK, chat_template=template)
    assert (reply.status, reply.error["param"]) == (400, "chat_template")
    assert reply.error["message"].endswith("a?")


async def test_requests_templates_have_threads_of_their_own(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Semaphore(0), threading.Event()
    render = ChatTemplate.render

    def held(self: ChatTemplate, messages: Any, **options: Any) -> str:
        if options["source"] is not None:
            entered.release()
            assert release.wait(30)
        return render(self, messages, **options)

    monkeypatch.setattr(ChatTemplate, "render", held)
    app = serve(FakeEngine(), TRUSTING)
    request = {"messages": TALK, "chat_template": "x"}
    waiting = [open_post(app, RENDER, request) for _ in range(4)]
    try:
        for _ in range(aside.MAX_WORKERS):
            await asyncio.to_thread(entered.acquire)
        reply = await post(app, "/tokenize", {"prompt": "x" * 3000})
        assert reply.json["count"] == 3001
        assert not any(each.task.done() for each in waiting)
    finally:
        release.set()
    assert [(await each.finish()).json["prompt"] for each in waiting] == ["x"] * 4
