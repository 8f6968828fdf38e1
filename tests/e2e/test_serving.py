"""A served tiny model, by the `openai` client over a socket."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import MODEL, Setup, Starting
from tests.e2e.server import ServerProcess, wait_until

pytestmark = pytest.mark.timeout(300)  # the first test waits for the compiler

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95, "seed": 7}


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def complete(
    client: openai.AsyncOpenAI, prompt: str, max_tokens: int = 24, **options: Any
) -> Any:
    """Complete a prompt, with token ids; end ids do not end it unless asked for."""
    extra = {"return_token_ids": True, "ignore_eos": True, **options.pop("extra_body", {})}
    return await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, extra_body=extra, **options
    )


async def stream_complete(
    client: openai.AsyncOpenAI, prompt: str, max_tokens: int = 24, **options: Any
) -> tuple[str, list[int]]:
    """Complete a prompt, streamed; returns text and token ids."""
    chunks = await complete(client, prompt, max_tokens, stream=True, **options)
    text, ids = "", list[int]()
    async for chunk in chunks:
        text += chunk.choices[0].text
        ids += getattr(chunk.choices[0], "token_ids", None) or []
    return text, ids


def test_health_is_red_until_the_model_is_ready(starting: Starting) -> None:
    assert (starting.health.status_code, starting.live.status_code) == (503, 200)
    assert starting.health.json()["phase"] in ("loading", "compiling")
    assert starting.models.status_code == 503
    assert "retry-after" in starting.models.headers

    starting.server.wait_ready()

    assert starting.server.get("/health").json()["phase"] == "ready"


def test_a_start_from_compiled_programs_compiles_none(server: ServerProcess) -> None:
    assert re.search(r"\d+ programs from the bundle, 0 compiled", server.log)
    told = re.search(r"ready after (\d+\.\d) s \((.*)\): ", server.log)
    assert told is not None
    parts = dict(re.findall(r"([a-z ]+) (\d+\.\d) s(?:, )?", told[2]))
    assert list(parts) == [
        *("importing", "fetching", "reading the tokenizer", "opening the device"),
        *("loading weights", "planning memory", "loading programs", "compiling programs"),
        *("warming up", "starting the engine"),
    ]
    # The whole start is told: each is rounded, by up to 0.05 s.
    assert float(told[1]) == pytest.approx(sum(map(float, parts.values())), abs=0.6)


def test_the_memory_table_is_logged(server: ServerProcess) -> None:
    assert "streams at full context 29 of 2048 tokens" in server.log


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_streamed_chat_is_the_unstreamed_one(
    server: ServerProcess, options: dict[str, Any]
) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=40, **options
        )
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                max_tokens=40,
                stream=True,
                stream_options={"include_usage": True},
                **options,
            )
        )

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    told, expected = chunks[-1].usage, whole.usage
    assert told is not None
    assert expected is not None
    # All but what is cached, which is more the second time.
    assert told.prompt_tokens == expected.prompt_tokens
    assert told.completion_tokens == expected.completion_tokens
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert ends[-1] == whole.choices[0].finish_reason


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_streamed_completion_is_the_unstreamed_one(
    client: openai.AsyncOpenAI, options: dict[str, Any]
) -> None:
    whole = await complete(client, "The sea is", **options)

    text, ids = await stream_complete(client, "The sea is", **options)

    assert (text, ids) == (whole.choices[0].text, whole.choices[0].token_ids)
    assert len(ids) == whole.usage.completion_tokens == 24


async def test_eight_streams_share_the_decode_batch_and_change_nothing(
    server: ServerProcess, client: openai.AsyncOpenAI
) -> None:
    prompts = ["The sea", "A", "One two three four five six seven eight", "Rain"] * 2
    options = [GREEDY] * 4 + [{**SAMPLED, "seed": seed} for seed in range(4)]
    n = 300
    alone = [
        await stream_complete(client, prompt, n, **option)
        for prompt, option in zip(prompts, options, strict=True)
    ]
    steps_before = server.metric("jaxserve_step_duration_seconds_count")

    together = await asyncio.gather(
        *(
            stream_complete(client, prompt, n, **option)
            for prompt, option in zip(prompts, options, strict=True)
        )
    )

    assert together == alone
    assert len({tuple(ids) for _, ids in alone}) == 8
    # One stream after the other would have taken 8 n steps.
    num_steps = server.metric("jaxserve_step_duration_seconds_count") - steps_before
    assert num_steps < 3 * n


async def test_a_stop_string_ends_the_text_before_it(client: openai.AsyncOpenAI) -> None:
    whole = (await complete(client, "The sea is", **GREEDY)).choices[0].text
    stop = whole[len(whole) // 2 :][:3]

    stopped = await complete(client, "The sea is", stop=[stop], **GREEDY)
    streamed, _ = await stream_complete(client, "The sea is", stop=[stop], **GREEDY)

    assert stopped.choices[0].text == streamed == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


async def test_samples_differ_and_a_seed_repeats_them(client: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"n": 2, "seed": 11, "temperature": 1.0}
    first, second = [
        [choice.token_ids for choice in (await complete(client, "Rain", **options)).choices]
        for _ in range(2)
    ]
    unseeded = [
        (await complete(client, "Rain", temperature=1.0)).choices[0].token_ids for _ in range(2)
    ]

    assert first == second
    assert first[0] != first[1]
    assert unseeded[0] != unseeded[1]


async def test_end_ids_end_a_text_unless_ignored(client: openai.AsyncOpenAI) -> None:
    async def ids(seed: int, ignore: bool) -> tuple[list[int], str]:
        answer = await complete(
            client, "Rain", 400, seed=seed, temperature=2.0, extra_body={"ignore_eos": ignore}
        )
        return answer.choices[0].token_ids, answer.choices[0].finish_reason

    ignoring = await asyncio.gather(*(ids(seed, True) for seed in range(8)))
    ending = await asyncio.gather(*(ids(seed, False) for seed in range(8)))

    assert {reason for _, reason in ignoring} == {"length"}
    assert "stop" in {reason for _, reason in ending}
    for (whole, _), (ended, reason) in zip(ignoring, ending, strict=True):
        assert ended == whole[: len(ended)]
        assert (ended[-1] in (1, 106)) == (reason == "stop")
        assert not {1, 106} & set(ended[:-1])


async def test_a_prompt_as_text_is_its_ids_with_one_bos(client: openai.AsyncOpenAI) -> None:
    by_text = await complete(client, "<bos>Rain", **GREEDY)
    same = await complete(client, "Rain", **GREEDY)
    bare = await complete(client, "Rain", extra_body={"add_special_tokens": False}, **GREEDY)

    assert by_text.choices[0].token_ids == same.choices[0].token_ids
    assert by_text.usage.prompt_tokens == same.usage.prompt_tokens == bare.usage.prompt_tokens + 1


@pytest.mark.parametrize("events", [0, 3])
async def test_a_client_that_leaves_frees_its_rows(
    server: ServerProcess, client: openai.AsyncOpenAI, events: int
) -> None:
    aborted = 'jaxserve_request_success_total{finished_reason="abort"}'
    aborts_before = server.metric(aborted)
    stream = await complete(client, "The sea is", 2000, stream=True, n=3, seed=1)
    for _ in range(events):
        await anext(stream)

    await stream.close()

    wait_until(lambda: server.metric(aborted) == aborts_before + 3)
    wait_until(lambda: server.metric("jaxserve_num_requests_running") == 0)
    assert server.metric("jaxserve_kv_pages_used") == 0


async def test_an_unstreamed_request_ends_with_its_connection(
    server: ServerProcess, client: openai.AsyncOpenAI
) -> None:
    # More sequences than rows, so that some still wait.
    answer = asyncio.create_task(complete(client, "The sea is", 2000, n=12))
    await asyncio.to_thread(wait_until, lambda: server.metric("jaxserve_num_requests_waiting") == 4)

    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)

    wait_until(lambda: server.metric("jaxserve_num_requests_running") == 0)
    assert server.metric("jaxserve_num_requests_waiting") == 0


async def test_a_refused_request_leaves_the_server_well(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await complete(client, "Rain", 4000)
    assert refusal.value.code == "context_length_exceeded"

    assert len((await complete(client, "Rain", 5)).choices[0].token_ids) == 5


def test_torch_was_never_imported_nor_anything_compiled(
    server: ServerProcess, setup: Setup
) -> None:
    assert not (setup.torch_trap / "found").exists()
    assert server.metric("jaxserve_serving_compiles_total") == 0
    # The trap works: an import of torch finds it.
    trap = {"PYTHONPATH": str(setup.torch_trap)}
    subprocess.run([sys.executable, "-c", "import torch"], env=trap, check=True)
    assert (setup.torch_trap / "found").exists()
