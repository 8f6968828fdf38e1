"""Requests with tools, and answers brought to one form whether they were streamed or not."""

import json
from typing import Any

from starlette.applications import Starlette

from tests.http.driver import post

CHAT = "/v1/chat/completions"
RENDER = "/v1/chat/completions/render"
USER: dict[str, Any] = {"role": "user", "content": "hi"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


SET_LAMP = tool("set_lamp", room={"type": "string"}, level={"type": "integer"})
TOOLS = [SET_LAMP, tool("b")]
ASK: dict[str, Any] = {"messages": [USER], "tools": TOOLS}
FORCED: dict[str, Any] = {**ASK, "tool_choice": "required"}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
ONE = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
}


def calling(arguments: Any = "{}", *, name: str = "set_lamp", id: str = "c1") -> dict[str, Any]:
    """A message with one call."""
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(content: Any = "done", *, id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


async def answers(app: Starlette, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each choice as message and finish; whole and streamed answers must agree."""
    reply = await post(app, CHAT, request)
    assert reply.status == 200, reply.body
    whole = [
        {**choice["message"], **{k: choice.get(k) for k in ("finish_reason", "finish_details")}}
        for choice in reply.json["choices"]
    ]
    streamed = await post(app, CHAT, {**request, "stream": True})
    assert streamed.body.endswith(b"data: [DONE]\n\n")
    n = request.get("n", 1)
    assert _without_ids([joined(streamed.chunks, index) for index in range(n)]) == _without_ids(
        whole
    )
    return whole


async def answer(app: Starlette, request: dict[str, Any]) -> dict[str, Any]:
    """Return the only choice."""
    [choice] = await answers(app, request)
    return choice


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return names and decoded arguments of a choice's calls."""
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice.get("tool_calls", [])
    ]


def joined(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Put a choice's deltas together, as strictly as any client."""
    message: dict[str, Any] = {"role": None, "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    for choice in own[:-1]:
        assert choice["finish_reason"] is None
        delta = choice["delta"]
        message["role"] = delta.pop("role", message["role"])
        message["content"] += delta.pop("content", "")
        for name in ("reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta.pop(name)
        for call in delta.pop("tool_calls", []):
            if call["index"] == len(calls):
                assert set(call) == {"index", "id", "type", "function"}
                assert set(call["function"]) == {"name", "arguments"}
                assert call["function"]["arguments"] == ""
                calls.append({k: call[k] for k in ("id", "type", "function")})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                assert call["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        assert not delta
    last = own[-1]
    assert last["delta"] == {}
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    details = last.get("finish_details")
    return {**message, "finish_reason": last["finish_reason"], "finish_details": details}


def _without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seen = [call["id"] for choice in choices for call in choice.get("tool_calls", [])]
    assert len(set(seen)) == len(seen)
    return [
        {**choice, "tool_calls": [{**c, "id": ""} for c in choice.get("tool_calls", [])]}
        for choice in choices
    ]
