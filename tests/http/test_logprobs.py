"""Log-probabilities as each answer writes them; what is likely is `score` of the fake engine."""

from collections.abc import Sequence
from typing import Any

import pytest

from jaxserve.errors import EngineError
from jaxserve.openai.logprobs import LogprobsWriter
from tests.fake_engine import BOS, EOS, FakeEngine, Script, ids, score
from tests.http.conftest import Serve
from tests.http.driver import post

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi"}
[C3] = ids(b"\xc3")


async def choice_of(serve: Serve, path: str, text: str, **fields: object) -> Any:
    base = HI if path == CHAT else PROMPT
    reply = await post(serve(FakeEngine(Script.say(text))), path, {**base, **fields})
    assert reply.status == 200
    return reply.json["choices"][0]


async def test_chat(serve: Serve) -> None:
    choice = await choice_of(serve, CHAT, "xé", logprobs=True, top_logprobs=4)
    top = [
        {"token": "a", "logprob": -1, "bytes": [97]},
        {"token": "b", "logprob": -2, "bytes": [98]},
        {"token": "bytes:\\xc3", "logprob": -3, "bytes": [0xC3]},
        {"token": "<eos>", "logprob": -4, "bytes": [*b"<eos>"]},
    ]
    [x, a9] = ids("x") + ids(b"\xa9")
    assert choice["message"]["content"] == "xé"
    assert choice["logprobs"] == {
        "content": [
            {"token": "x", "logprob": -100 - x, "bytes": [120], "top_logprobs": top},
            {"token": "bytes:\\xc3", "logprob": -3, "bytes": [0xC3], "top_logprobs": top},
            {"token": "bytes:\\xa9", "logprob": -100 - a9, "bytes": [0xA9], "top_logprobs": top},
            {"token": "<eos>", "logprob": -4, "bytes": [*b"<eos>"], "top_logprobs": top},
        ],
        "refusal": None,
    }
    data = [byte for entry in choice["logprobs"]["content"][:-1] for byte in entry["bytes"]]
    assert bytes(data).decode() == choice["message"]["content"]


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 0}, {"top_logprobs": None}])
async def test_chat_without_likeliest(serve: Serve, fields: dict[str, object]) -> None:
    choice = await choice_of(serve, CHAT, "a", logprobs=True, **fields)
    content = choice["logprobs"]["content"]
    assert [(entry["token"], entry["top_logprobs"]) for entry in content] == [
        ("a", []),
        ("<eos>", []),
    ]


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"logprobs": None}])
async def test_chat_tells_nothing_unasked(serve: Serve, fields: dict[str, object]) -> None:
    engine = FakeEngine()
    reply = await post(serve(engine), CHAT, {**HI, **fields})
    assert reply.json["choices"][0]["logprobs"] is None
    assert engine.requests[0].sampling.num_logprobs is None


@pytest.mark.parametrize("logprobs", [None, False])
async def test_top_logprobs_need_logprobs(serve: Serve, logprobs: object) -> None:
    request = {**HI, "logprobs": logprobs, "top_logprobs": 2}
    reply = await post(serve(FakeEngine()), CHAT, request)
    assert (reply.status, reply.error["param"]) == (400, "top_logprobs")


async def test_completion(serve: Serve) -> None:
    choice = await choice_of(serve, COMPLETIONS, "xaé", logprobs=2)
    [x, a9] = ids("x") + ids(b"\xa9")
    likeliest = {"a": -1, "b": -2}
    assert choice["logprobs"] == {
        "tokens": ["x", "a", "bytes:\\xc3", "bytes:\\xa9", "<eos>"],
        "token_logprobs": [-100 - x, -1, -3, -100 - a9, -4],
        "top_logprobs": [
            {**likeliest, "x": -100 - x},
            likeliest,
            {**likeliest, "bytes:\\xc3": -3},
            {**likeliest, "bytes:\\xa9": -100 - a9},
            {**likeliest, "<eos>": -4},
        ],
        "text_offset": [0, 1, 2, 2, 2],
    }


async def test_completion_without_likeliest(serve: Serve) -> None:
    choice = await choice_of(serve, COMPLETIONS, "b", logprobs=0)
    assert choice["logprobs"]["top_logprobs"] == [{"b": -2}, {"<eos>": -4}]


async def test_offset_of_what_closes_a_run_of_bytes(serve: Serve) -> None:
    choice = await choice_of(serve, COMPLETIONS, "é🙂z!", logprobs=0)
    offsets = dict(
        zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)
    )
    assert choice["text"].index("z") == offsets["z"] == 2
    assert choice["text"].index("!") == offsets["!"] == 3
    assert offsets["bytes:\\x82"] == 0  # a byte's is where its run begins


async def test_as_token_ids(serve: Serve) -> None:
    fields = {"return_tokens_as_token_ids": True}
    [b] = ids("b")
    choice = await choice_of(serve, COMPLETIONS, "b", logprobs=1, **fields)
    assert choice["logprobs"]["tokens"] == [f"token_id:{b}", f"token_id:{EOS}"]
    assert set(choice["logprobs"]["top_logprobs"][0]) == {f"token_id:{i}" for i in ids("ab")}
    choice = await choice_of(serve, CHAT, "b", logprobs=True, top_logprobs=3, **fields)
    entry = choice["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == (f"token_id:{b}", [98])
    assert entry["top_logprobs"][2] == {"token": f"token_id:{C3}", "logprob": -3, "bytes": [0xC3]}


async def test_tokens_behind_a_stop_string_are_not_told(serve: Serve) -> None:
    script = Script(steps=(ids("ab##c"), ids("d")), end=None)
    request = {**PROMPT, "stop": "#", "logprobs": 0, "return_token_ids": True}
    choice = (await post(serve(FakeEngine(script)), COMPLETIONS, request)).json["choices"][0]
    assert choice["logprobs"]["tokens"] == ["a", "b", "#"]
    assert choice["token_ids"] == [*ids("ab#")]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_chunk_tells_of_its_own_tokens(serve: Serve, path: str) -> None:
    fields: dict[str, object] = (
        {**HI, "logprobs": True} if path == CHAT else {**PROMPT, "logprobs": 0}
    )
    engine = FakeEngine(Script(steps=(ids("ab"), ids(b"\xc3"), ids(b"\xa9"), (EOS,))))
    reply = await post(serve(engine), path, {**fields, "stream": True})
    chunks = [chunk["choices"][0] for chunk in reply.chunks]
    told = [chunk["logprobs"] for chunk in chunks]
    assert told[-1] is None  # the finish
    if path == CHAT:
        assert told[0] is None  # the role
        tokens = [[entry["token"] for entry in each["content"]] for each in told[1:] if each]
    else:
        tokens = [each["tokens"] for each in told if each]
    assert tokens == [["a", "b"], ["bytes:\\xc3"], ["bytes:\\xa9"], ["<eos>"]]


def prompt_entry(token_id: int, spelling: str) -> dict[str, object]:
    scored = score(token_id)
    return {"logprob": scored.logprob, "rank": scored.rank, "decoded_token": spelling}


@pytest.mark.parametrize("scores_per_event", [1, 2, 9])
async def test_prompt_logprobs(serve: Serve, scores_per_event: int) -> None:
    [a, x] = ids("ax")
    script = Script(steps=((EOS,),), scores_per_event=scores_per_event)
    request = {"prompt": [BOS, a, C3, x], "prompt_logprobs": 1, "n": 2}
    reply = await post(serve(FakeEngine(script)), COMPLETIONS, request)
    for choice in reply.json["choices"]:
        assert choice["prompt_logprobs"] == [
            None,
            {str(a): prompt_entry(a, "a")},
            {str(a): prompt_entry(a, "a"), str(C3): prompt_entry(C3, "bytes:\\xc3")},
            {str(a): prompt_entry(a, "a"), str(x): prompt_entry(x, "x")},
        ]
    assert prompt_entry(C3, "")["rank"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_once_for_all_its_answers(serve: Serve, stream: bool) -> None:
    """Also where the scores come after the other answers' tokens."""
    slow, quick = (Script(steps=((EOS,),), delay_s=delay_s) for delay_s in (0.01, 0.0))
    engine = FakeEngine(slow, quick, quick, slow, quick, quick)
    prompts = [[*ids("abc")], [*ids("de")]]
    request = {"prompt": prompts, "echo": True, "logprobs": 0, "n": 3, "stream": stream}
    reply = await post(serve(engine), COMPLETIONS, request)
    asked = [each.sampling.num_prompt_logprobs for each in engine.requests]
    assert asked == [0, None, None, 0, None, None]
    told: list[list[str]] = [[] for _ in asked]
    for choice in (
        [chunk["choices"][0] for chunk in reply.chunks] if stream else reply.json["choices"]
    ):
        told[choice["index"]] += (choice["logprobs"] or {"tokens": []})["tokens"]
    assert told == [[*"abc", "<eos>"]] * 3 + [[*"de", "<eos>"]] * 3


async def test_prompt_logprobs_of_a_chat_and_of_each_prompt(serve: Serve) -> None:
    reply = await post(serve(FakeEngine()), CHAT, {**HI, "prompt_logprobs": 0})
    prompt = (BOS, *ids("[user]hi[model]"))
    assert [list(entry) for entry in reply.json["prompt_logprobs"][1:]] == [
        [str(token_id)] for token_id in prompt[1:]
    ]
    assert "prompt_logprobs" not in reply.json["choices"][0]
    reply = await post(
        serve(FakeEngine()), COMPLETIONS, {"prompt": ["", "a"], "prompt_logprobs": 0}
    )
    [a] = ids("a")
    told = [choice["prompt_logprobs"] for choice in reply.json["choices"]]
    assert told == [[None], [None, {str(a): prompt_entry(a, "a")}]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_nothing_of_the_prompt_unasked(serve: Serve, path: str) -> None:
    engine = FakeEngine()
    reply = await post(serve(engine), path, HI if path == CHAT else PROMPT)
    assert b"prompt_logprobs" not in reply.body
    assert engine.requests[0].sampling.num_prompt_logprobs is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_prompt_logprobs_are_refused_in_streams(serve: Serve, path: str) -> None:
    request = {**(HI if path == CHAT else PROMPT), "stream": True, "prompt_logprobs": 0}
    reply = await post(serve(FakeEngine()), path, request)
    assert (reply.status, reply.error["param"]) == (400, "prompt_logprobs")


async def test_prompt_and_answer_have_limits_of_their_own(serve: Serve) -> None:
    engine = FakeEngine(Script.say("x"))
    request = {**PROMPT, "prompt_logprobs": 2, "logprobs": 5, "echo": True}
    choice = (await post(serve(engine), COMPLETIONS, request)).json["choices"][0]
    sampling = engine.requests[0].sampling
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (5, 5)
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3, 3]
    told = choice["logprobs"]
    assert told["tokens"] == ["<bos>", "h", "i", "x", "<eos>"]
    assert [len(top) for top in told["top_logprobs"][1:]] == [6, 6, 6, 5]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_while_the_prompt_is_scored(serve: Serve, stream: bool) -> None:
    engine = FakeEngine(Script(end=EngineError("lost")))
    request = {**PROMPT, "echo": True, "logprobs": 1, "stream": stream}
    reply = await post(serve(engine), COMPLETIONS, request)
    error = reply.chunks[0]["error"] if stream else reply.error
    assert error["message"] == "lost"
    assert not engine.live


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (CHAT, {"prompt_logprobs": 1}, "prompt"),
        (COMPLETIONS, {"prompt_logprobs": 1}, "prompt"),
        (COMPLETIONS, {"echo": True, "logprobs": 1, "max_tokens": 0}, "completion"),
    ],
)
async def test_what_is_told_of_a_prompt_is_written_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, object], told: str
) -> None:
    """Of any length: a long one is written in a worker thread."""
    written: list[int] = []
    write = getattr(LogprobsWriter, told)

    def note(self: LogprobsWriter, tokens: Sequence[object], num_top: int) -> object:
        written.append(len(tokens))
        return write(self, tokens, num_top)

    monkeypatch.setattr(LogprobsWriter, told, note)
    for text in ("hi", "a" * 600):
        prompt: dict[str, object] = {"prompt": text}
        if path == CHAT:
            prompt = {"messages": [{"role": "user", "content": text}]}
        reply = await post(serve(FakeEngine()), path, {**prompt, **fields, "n": 3})
        assert (reply.status, len(written)) == (200, 1)
        written.clear()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        # 900 tokens, 21 log-probabilities of each, 56 choices: 1,058,400.
        (COMPLETIONS, {"prompt_logprobs": 20, "n": 56}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 20, "n": 55}, None),
        (COMPLETIONS, {"logprobs": 20, "echo": True, "n": 56}, "logprobs"),
        (COMPLETIONS, {"logprobs": 20, "n": 56}, None),
        # A chat tells its prompt's once.
        (CHAT, {"prompt_logprobs": 20, "n": 56}, None),
    ],
)
async def test_how_much_is_told_of_prompts_is_bounded(
    serve: Serve, path: str, fields: dict[str, object], param: str | None
) -> None:
    engine = FakeEngine(Script(steps=((EOS,),), scores_per_event=900))
    prompt: dict[str, object] = {"prompt": [7] * 900}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": "a" * 900}]}
    reply = await post(serve(engine), path, {**prompt, **fields})
    if param is None:
        assert reply.status == 200
    else:
        assert (reply.status, reply.error["param"]) == (400, param)
        assert "at most 1048576" in reply.error["message"]
