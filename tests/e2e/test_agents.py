"""Agents of the frameworks that people have, with two tools, from the question to the answer.

The server is the whole HTTP stack on a loopback socket, the model a script: it thinks and adds,
then shouts the sum, then says it. So every framework has to bring two results back, each in the
turn of its call.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, SecretStr

from jaxserve.http.app import build_app
from jaxserve.http.config import HttpConfig
from jaxserve.http.served_model import ServedModel
from jaxserve.metrics import Metrics
from tests.e2e.conftest import LOCAL_ONLY
from tests.fake_engine import FakeEngine, Script, byte_model, turn_ids
from tests.http.inline_grammars import Ways, with_grammars
from tests.http.sockets import running

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("this_machine_only"),
    # Other people's packages, in versions of their own choice.
    pytest.mark.filterwarnings("ignore"),
]

MODEL = "org/byte-model"
QUESTION = "What is 2 + 3?"
ANSWER = "It is 5!"
THOUGHT = "<|channel>thought\nI add first.\n<channel|>"
ADD = "<|tool_call>call:add{a:2,b:3}<tool_call|>"
SHOUT = '<|tool_call>call:shout{text:<|"|>5<|"|>}<tool_call|>'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def shout(text: str) -> str:
    """Say it loudly."""
    return f"{text}!"


@dataclass(frozen=True, slots=True)
class Server:
    """A scripted server, and what it was asked."""

    url: str
    engine: FakeEngine

    def check_prompts(self) -> None:
        """Each turn begins with all that was said before, word for word.

        And the grammar of its calls lets through what the model says.
        """
        assert len(self.engine.prompts) == 3
        turns = (THOUGHT + ADD, SHOUT, ANSWER)
        for request, turn in zip(self.engine.requests, turns, strict=True):
            assert Ways(request)(turn) is True
            assert Ways(request)("<|tool_call>call:add{a:x") is None
        _, second, third = self.engine.prompts
        # The thought is dropped where a framework does not send it back.
        assert _is_in(turn_ids(ADD), second)
        five = turn_ids('<|tool_response>response:add{value:<|"|>5<|"|>}<tool_response|>')
        assert second[-len(five) :] == five
        loud = turn_ids('<|tool_response>response:shout{value:<|"|>5!<|"|>}<tool_response|>')
        said = (*second, *turn_ids(SHOUT), *loud)
        assert third == said


def _is_in(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole)))


@pytest.fixture(scope="session")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("gemma4")
    return with_grammars(byte_model(folder, max_model_len=100_000, is_gemma4=True))


@asynccontextmanager
async def serving(
    model: ServedModel, said: tuple[str, ...] = (THOUGHT + ADD, SHOUT, ANSWER)
) -> AsyncIterator[Server]:
    engine = FakeEngine(*(Script.say(text, ids_per_step=3) for text in said))
    app = build_app(engine, lambda: model, config=HttpConfig(), metrics=Metrics())
    async with running(app) as port:
        yield Server(f"http://127.0.0.1:{port}/v1", engine)


@pytest.fixture
async def server(gemma4: ServedModel) -> AsyncIterator[Server]:
    async with serving(gemma4) as server:
        yield server


class Add(BaseModel):
    """Add two numbers."""

    a: int
    b: int


class Shout(BaseModel):
    """Say it loudly."""

    text: str


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai(server: Server, streamed: bool) -> None:
    tools = [
        openai.pydantic_function_tool(Add, name="add"),
        openai.pydantic_function_tool(Shout, name="shout"),
    ]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    deltas: list[str] = []
    async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        for _ in range(3):
            if streamed:
                async with client.chat.completions.stream(
                    model=MODEL, messages=messages, tools=tools
                ) as events:
                    deltas += [
                        event.arguments_delta
                        async for event in events
                        if event.type == "tool_calls.function.arguments.delta"
                    ]
                    completion = await events.get_final_completion()
            else:
                completion = await client.chat.completions.parse(
                    model=MODEL, messages=messages, tools=tools
                )
            message = completion.choices[0].message
            messages.append(message.to_dict() if streamed else message)
            if not message.tool_calls:
                break
            assert completion.choices[0].finish_reason == "tool_calls"
            for call in message.tool_calls:
                parsed = call.function.parsed_arguments
                if isinstance(parsed, Add):
                    told = str(add(parsed.a, parsed.b))
                else:
                    assert isinstance(parsed, Shout)
                    told = shout(parsed.text)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told})

    assert message.content == ANSWER
    server.check_prompts()
    if streamed:
        assert "".join(deltas) == '{"a":2,"b":3}{"text":"5"}'
    first = messages[1] if streamed else messages[1].to_dict()
    assert first["reasoning"] == "I add first."


@pytest.mark.skipif(find_spec("agents") is None, reason="needs the extra `clients`")
@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_agents(server: Server, streamed: bool) -> None:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        agent = Agent(
            name="adder",
            instructions="Use the tools.",
            tools=[function_tool(add), function_tool(shout)],
            model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
        )
        if streamed:
            run = Runner.run_streamed(agent, QUESTION)
            async for _ in run.stream_events():
                pass
            output = run.final_output
        else:
            output = (await Runner.run(agent, QUESTION)).final_output

    assert output == ANSWER
    server.check_prompts()


@pytest.mark.skipif(find_spec("pydantic_ai") is None, reason="needs the extra `clients`")
@pytest.mark.parametrize("streamed", [False, True])
async def test_pydantic_ai(server: Server, streamed: bool) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with httpx.AsyncClient() as http_client:
        provider = OpenAIProvider(base_url=server.url, api_key="none", http_client=http_client)
        agent = Agent(OpenAIChatModel(MODEL, provider=provider), instructions="Use the tools.")
        agent.tool_plain(add)
        agent.tool_plain(shout)
        if streamed:
            async with agent.run_stream(QUESTION) as run:
                output = await run.get_output()
        else:
            output = (await agent.run(QUESTION)).output

    assert output == ANSWER
    server.check_prompts()


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="needs the extra `clients`")
@pytest.mark.parametrize("streamed", [False, True])
async def test_langchain(server: Server, streamed: bool) -> None:
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    tools = {each.name: each for each in (tool(add), tool(shout))}
    async with httpx.AsyncClient() as http_async_client:
        with httpx.Client() as http_client:
            chat = ChatOpenAI(
                base_url=server.url,
                api_key=SecretStr("none"),
                model=MODEL,
                max_retries=0,
                http_client=http_client,
                http_async_client=http_async_client,
            ).bind_tools([*tools.values()])
            messages: list[Any] = [HumanMessage(QUESTION)]
            for _ in range(3):
                if streamed:
                    chunks = [chunk async for chunk in chat.astream(messages)]
                    answer: Any = sum(chunks[1:], chunks[0])
                else:
                    answer = await chat.ainvoke(messages)
                assert isinstance(answer, AIMessage)
                messages.append(answer)
                messages += [await tools[call["name"]].ainvoke(call) for call in answer.tool_calls]

    assert messages[-1].content == ANSWER
    server.check_prompts()


# Calls that have to be made


class Sum(BaseModel):
    """A sum."""

    total: int


SUM = "<|tool_call>call:{}{{total:5}}<tool_call|>"


async def test_openai_forces_a_function(gemma4: ServedModel) -> None:
    async with (
        serving(gemma4, (SUM.format("Sum"),)) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        for choice in ("required", {"type": "function", "function": {"name": "Sum"}}):
            completion = await client.chat.completions.parse(
                model=MODEL,
                messages=[{"role": "user", "content": QUESTION}],
                tools=[openai.pydantic_function_tool(Sum, name="Sum")],
                tool_choice=choice,  # type: ignore[arg-type]
            )
            calls = completion.choices[0].message.tool_calls or []
            assert [call.function.parsed_arguments for call in calls] == [Sum(total=5)]
        assert Ways(server.engine.requests[0])("It is 5.") is None


@pytest.mark.skipif(find_spec("agents") is None, reason="needs the extra `clients`")
async def test_openai_agents_requires_a_tool(gemma4: ServedModel) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    async with (
        serving(gemma4, (ADD, ANSWER)) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        agent = Agent(
            name="adder",
            tools=[function_tool(add)],
            model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
            model_settings=ModelSettings(tool_choice="required"),
        )
        assert (await Runner.run(agent, QUESTION)).final_output == ANSWER
        assert Ways(server.engine.requests[0])(ANSWER) is None


@pytest.mark.skipif(find_spec("pydantic_ai") is None, reason="needs the extra `clients`")
async def test_pydantic_ai_requires_its_output(gemma4: ServedModel) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with (
        serving(gemma4, (SUM.format("final_result"),)) as server,
        httpx.AsyncClient() as http_client,
    ):
        provider = OpenAIProvider(base_url=server.url, api_key="none", http_client=http_client)
        agent = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=Sum)
        assert (await agent.run(QUESTION)).output == Sum(total=5)
        assert Ways(server.engine.requests[0])(ANSWER) is None


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="needs the extra `clients`")
async def test_langchain_forces_its_output(gemma4: ServedModel) -> None:
    from langchain_openai import ChatOpenAI

    async with (
        serving(gemma4, (SUM.format("Sum"),)) as server,
        httpx.AsyncClient() as http_async_client,
    ):
        with httpx.Client() as http_client:
            chat = ChatOpenAI(
                base_url=server.url,
                api_key=SecretStr("none"),
                model=MODEL,
                max_retries=0,
                http_client=http_client,
                http_async_client=http_async_client,
            ).with_structured_output(Sum, method="function_calling")
            assert await chat.ainvoke(QUESTION) == Sum(total=5)
        assert Ways(server.engine.requests[0])(ANSWER) is None


LITELLM = """
import asyncio, json, sys

import litellm

litellm.telemetry = False
url, model, streamed = sys.argv[1], sys.argv[2], sys.argv[3] == "True"

def tool(name, **types):
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}

options = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "max_retries": 0}
options["tools"] = [tool("add", a="integer", b="integer"), tool("shout", text="string")]
tools = {"add": lambda a, b: str(a + b), "shout": lambda text: text + "!"}

async def main():
    messages = [{"role": "user", "content": sys.argv[4]}]
    for _ in range(3):
        if streamed:
            stream = await litellm.acompletion(**options, messages=messages, stream=True)
            chunks = [chunk async for chunk in stream]
            answer = litellm.stream_chunk_builder(chunks, messages=messages)
        else:
            answer = await litellm.acompletion(**options, messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            told = tools[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    reasoning = messages[1]["reasoning_content"]
    print(json.dumps({"answer": message.content, "reasoning": reasoning, "asked": asked}))

asyncio.run(main())
"""


@pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra `clients`")
@pytest.mark.parametrize("streamed", [False, True])
async def test_litellm(server: Server, streamed: bool) -> None:
    # A process of its own: importing it takes seconds, and it sets signal and exit handlers.
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-W",
            "ignore",
            "-c",
            LOCAL_ONLY + LITELLM,
            server.url,
            MODEL,
            str(streamed),
        ),
        QUESTION,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 200)

    assert process.returncode == 0, errors.decode()
    told = json.loads(output.decode().splitlines()[-1])
    assert told == {"answer": ANSWER, "reasoning": "I add first.", "asked": []}
    server.check_prompts()
