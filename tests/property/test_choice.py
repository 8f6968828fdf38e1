"""The answer on the wire, whole and streamed, against one made by hand: decode all, search all.

However the ids are cut into steps, and whatever is asked for at once, text, ids, log-probabilities
and ending are the same. The oracle decodes with the tokenizers library and searches with endswith.
"""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.http.app import build_app
from jaxserve.http.config import HttpConfig
from jaxserve.metrics import Metrics
from tests.fake_engine import (
    BOS,
    END_OF_TURN,
    EOS,
    IMAGE,
    LIKELIEST,
    PAD,
    FakeEngine,
    Script,
    byte_model,
    ids,
    score,
)
from tests.http.driver import Connection, post

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SAID = "hé"
MODEL_ENDS = {EOS, END_OF_TURN}
FIRST_BYTE, FIRST_REAL_BYTE = ids(b"\x00")[0], ids(b"\x80")[0]

with tempfile.TemporaryDirectory() as folder:
    MODEL = byte_model(Path(folder))
    LIBRARY = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")


@dataclass(frozen=True, kw_only=True)
class Output:
    """What the engine generates for one choice."""

    steps: list[list[int]]
    ends_by_id: bool

    @property
    def ids(self) -> list[int]:
        return [token_id for step in self.steps for token_id in step]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request and the outputs of its choices."""

    path: str
    prompt_ids: tuple[int, ...]
    prompt_is_text: bool
    fields: Json
    outputs: list[Output] = field(default_factory=list)

    @property
    def own_ends(self) -> set[int]:
        return set(self.fields["stop_token_ids"])

    @property
    def ends(self) -> set[int]:
        return self.own_ends | (set() if self.fields["ignore_eos"] else MODEL_ENDS)

    @property
    def num_top(self) -> int | None:
        """How many of the likeliest are told; None: no log-probabilities."""
        asked: int | bool | None = self.fields["logprobs"]
        if self.path == COMPLETIONS:
            return asked
        return int(self.fields["top_logprobs"]) if asked else None

    def decode(self, token_ids: Sequence[int]) -> str:
        hides = self.fields["skip_special_tokens"]
        return str(LIBRARY.decode(list(token_ids), skip_special_tokens=hides))

    @property
    def echo(self) -> str:
        if not self.fields["echo"]:
            return ""
        return SAID if self.prompt_is_text else self.decode(self.prompt_ids)


# What is generated: few letters, so that stop strings overlap; whole and broken characters.
PARTS = st.one_of(
    st.sampled_from([ids(word) for word in ("a", "b", "ab", "a ", "<", "é", "€", "🙂")]),
    st.sampled_from([ids(bytes([byte])) for byte in (0xC3, 0xA9, 0xE2, 0xF0, 0x80, 0xFF)]),
    st.sampled_from([(PAD,), (EOS,), (IMAGE,)]),
)
STOPS = st.one_of(
    st.sampled_from(["a", "b", "ab", "ba", "aab", " ", "é", "\ufffd", "\ufffdb", "<eos>"]),
    st.text("abé\ufffd", min_size=1, max_size=4),
)
STOP_IDS = st.sampled_from([[], [EOS], [EOS, *ids("b")], [*ids("<")], [*ids(b"\xa9")], [PAD]])


@st.composite
def outputs(draw: st.DrawFn, case: Case) -> Output:
    drawn = [token_id for part in draw(st.lists(PARTS, max_size=6)) for token_id in part]
    output_ids = [token_id for token_id in drawn if token_id not in case.ends]
    may_end = bool(case.ends) and len(output_ids) >= case.fields["min_tokens"]
    ends_by_id = may_end and draw(st.booleans())
    if ends_by_id:
        output_ids.append(draw(st.sampled_from(sorted(case.ends))))
    cuts = draw(st.lists(st.integers(0, len(output_ids)), max_size=5))
    pairs = pairwise([0, *sorted(cuts), len(output_ids)])
    return Output(steps=[output_ids[a:b] for a, b in pairs if a < b], ends_by_id=ends_by_id)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    path = draw(st.sampled_from([CHAT, COMPLETIONS]))
    fields: Json = {
        "stop": draw(st.lists(STOPS, max_size=4)),
        "stop_token_ids": draw(STOP_IDS),
        "min_tokens": draw(st.sampled_from([0, 1, 2, 4])),
        "n": draw(st.sampled_from([1, 4])),
        "max_tokens": 100,
    }
    for name in (
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "echo",
    ):
        fields[name] = draw(st.booleans())
    prompt_is_text = path == CHAT or draw(st.booleans())
    if path == CHAT:
        prompt = (BOS, *ids(f"[assistant]{SAID}"))
        fields["messages"] = [{"role": "assistant", "content": SAID}]
        fields["continue_final_message"] = True
        fields["logprobs"] = draw(st.booleans())
        fields["top_logprobs"] = draw(st.integers(0, 4)) if fields["logprobs"] else None
    else:
        prompt = (BOS, *ids(SAID)) if prompt_is_text else (BOS, *ids("aéb"), PAD, *ids(b"\xc3"))
        fields["prompt"] = SAID if prompt_is_text else list(prompt)
        fields["logprobs"] = draw(st.sampled_from([None, 0, 1, 4]))
    case = Case(path=path, prompt_ids=prompt, prompt_is_text=prompt_is_text, fields=fields)
    case.outputs.extend(draw(outputs(case)) for _ in range(fields["n"]))
    return case


# The oracle


@dataclass(kw_only=True)
class Expected:
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None


def is_byte(token_id: int) -> bool:
    return token_id >= FIRST_REAL_BYTE


def final_text(case: Case, token_ids: Sequence[int]) -> str:
    """The text that no id to come can change: without the bytes that end it."""
    hidden = range(FIRST_BYTE) if case.fields["skip_special_tokens"] else range(0)
    end = len(token_ids)
    while end and (is_byte(token_ids[end - 1]) or token_ids[end - 1] in hidden):
        end -= 1
    return case.decode(token_ids[:end])


def expect(case: Case, output: Output) -> Expected:
    includes = case.fields["include_stop_str_in_output"]
    all_ids = output.ids
    # An id that ends the sequence is no text.
    shown = all_ids[:-1] if output.ends_by_id and not includes else all_ids
    finals = [final_text(case, shown[:k]) for k in range(len(all_ids) + 1)]
    finals.append(case.decode(shown))
    for k, (before, after) in enumerate(pairwise(finals), start=1):
        num_tokens = min(k, len(all_ids))
        if num_tokens <= case.fields["min_tokens"]:
            continue
        for end in range(len(before) + 1, len(after) + 1):
            hits = [stop for stop in case.fields["stop"] if after[:end].endswith(stop)]
            if hits:
                hit = max(hits, key=len)
                return Expected(
                    text=after[: end if includes else end - len(hit)],
                    token_ids=all_ids[:num_tokens],
                    finish_reason="stop",
                    stop_reason=hit,
                )
    last = all_ids[-1] if output.ends_by_id else None
    is_own = last in case.own_ends and (case.fields["ignore_eos"] or last not in MODEL_ENDS)
    return Expected(
        text=finals[-1],
        token_ids=all_ids,
        finish_reason="stop" if output.ends_by_id else "length",
        stop_reason=last if is_own else None,
    )


def spell(case: Case, token_id: int) -> str:
    if case.fields["return_tokens_as_token_ids"]:
        return f"token_id:{token_id}"
    if is_byte(token_id):
        return f"bytes:\\x{token_id - FIRST_BYTE:02x}"
    return str(LIBRARY.decode([token_id], skip_special_tokens=False))


def offsets(case: Case, token_ids: Sequence[int], num_shown: int) -> list[int]:
    """Where each token's text begins; the text of a run of bytes comes with what follows it."""
    result = []
    for i, token_id in enumerate(token_ids):
        before = len(final_text(case, token_ids[:i]))
        after = len(final_text(case, token_ids[: i + 1])) if i < num_shown else before
        own = 0 if is_byte(token_id) or after == before else len(case.decode([token_id]))
        result.append(after - own)
    return result


def expect_completion_logprobs(case: Case, output: Output, token_ids: list[int]) -> Json:
    includes = case.fields["include_stop_str_in_output"]
    num_shown = len(output.ids) - (output.ends_by_id and not includes)
    scored = list(token_ids)
    where = [len(case.echo) + at for at in offsets(case, scored, num_shown)]
    logprobs: list[float | None] = [score(token_id).logprob for token_id in scored]
    if case.fields["echo"]:
        prompt = list(case.prompt_ids)
        if case.prompt_is_text:  # the added BOS is no text, the rest is as it was sent
            prompt_offsets = [0, *offsets(case, prompt[1:], len(prompt) - 1)]
        else:
            prompt_offsets = offsets(case, prompt, len(prompt))
        scored = prompt + scored
        where = prompt_offsets + where
        logprobs = [None, *(score(token_id).logprob for token_id in prompt[1:]), *logprobs]
    likeliest = [{i: score(i).logprob for i in LIKELIEST[: case.num_top]} for _ in scored]
    tops: list[Json | None] = [
        None if own is None else {spell(case, i): p for i, p in {**top, token_id: own}.items()}
        for top, token_id, own in zip(likeliest, scored, logprobs, strict=True)
    ]
    return {
        "tokens": [spell(case, token_id) for token_id in scored],
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": where,
    }


def expect_chat_logprobs(case: Case, token_ids: list[int]) -> Json:
    def entry(token_id: int) -> Json:
        raw = LIBRARY.decode([token_id], skip_special_tokens=False).encode()
        return {
            "token": spell(case, token_id),
            "logprob": score(token_id).logprob,
            "bytes": [token_id - FIRST_BYTE] if is_byte(token_id) else [*raw],
        }

    top = [entry(token_id) for token_id in LIKELIEST[: case.num_top]]
    content = [{**entry(token_id), "top_logprobs": top} for token_id in token_ids]
    return {"content": content, "refusal": None}


# The two forms of the answer


def check_choice(case: Case, index: int, choice: Json) -> None:
    """Compare a choice in the form that both ways of answering are brought to."""
    output = case.outputs[index]
    expected = expect(case, output)
    wanted: Json = {
        "index": index,
        "text": case.echo + expected.text,
        "finish_reason": expected.finish_reason,
        "stop_reason": expected.stop_reason,
        "logprobs": None,
    }
    if case.num_top is not None and case.path == CHAT:
        wanted["logprobs"] = expect_chat_logprobs(case, expected.token_ids)
    elif case.num_top is not None:
        wanted["logprobs"] = expect_completion_logprobs(case, output, expected.token_ids)
    if case.fields["return_token_ids"]:
        wanted["token_ids"] = expected.token_ids
    assert choice == wanted


def check_usage(case: Case, usage: Json) -> None:
    num_output = sum(len(expect(case, output).token_ids) for output in case.outputs)
    assert usage["prompt_tokens"] == len(case.prompt_ids)
    assert usage["completion_tokens"] == num_output
    assert usage["total_tokens"] == len(case.prompt_ids) + num_output
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def check_whole(case: Case, reply: Connection) -> None:
    answer = reply.json
    assert len(answer["choices"]) == len(case.outputs)
    for index, choice in enumerate(answer["choices"]):
        if case.path == CHAT:
            choice["text"] = choice.pop("message")["content"]
        choice.pop("prompt_token_ids", None)
        check_choice(case, index, choice)
    check_usage(case, answer["usage"])


def check_stream(case: Case, reply: Connection, *, usage: bool, continuous: bool) -> None:
    *events, end = reply.body.decode().removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        check_usage(case, last["usage"])
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    assert len(told) == (len(chunks) if usage and continuous else 0)
    assert told == sorted(told)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    for index, output in enumerate(case.outputs):
        own = [choice for choice in choices if choice["index"] == index]
        if case.path == CHAT:
            assert own.pop(0)["delta"] == {"role": "assistant", "content": ""}
            assert all(set(choice["delta"]) == {"content"} for choice in own[:-1])
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        # Beside one chunk for each step: its ids, its echo, what was held back, and the finish.
        assert len(own) <= len(output.steps) + 4
        check_choice(case, index, joined(case, own))


def joined(case: Case, chunks: list[Json]) -> Json:
    parts = [c["delta"].get("content", "") if case.path == CHAT else c["text"] for c in chunks]
    choice: Json = {
        "index": chunks[0]["index"],
        "text": "".join(parts),
        "finish_reason": chunks[-1]["finish_reason"],
        "stop_reason": chunks[-1]["stop_reason"],
        "logprobs": None,
    }
    told = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    if case.num_top is not None:
        keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists = ("content",) if case.path == CHAT else keys
        choice["logprobs"] = {key: [x for each in told for x in each[key]] for key in lists}
        if case.path == CHAT:
            choice["logprobs"]["refusal"] = None
    else:
        assert not told
    if case.fields["return_token_ids"]:
        choice["token_ids"] = [i for chunk in chunks for i in chunk.get("token_ids", [])]
    else:
        assert not any("token_ids" in chunk for chunk in chunks)
    return choice


def ask(case: Case, fields: Json) -> Connection:
    scripts = [
        Script(
            steps=tuple(map(tuple, output.steps)),
            end="stop" if output.ends_by_id else "length",
        )
        for output in case.outputs
    ]
    app = build_app(FakeEngine(*scripts), lambda: MODEL, config=HttpConfig(), metrics=Metrics())
    reply = asyncio.run(post(app, case.path, {**case.fields, **fields}))
    assert reply.status == 200, reply.body
    return reply


@given(cases(), st.booleans(), st.booleans())
@settings(max_examples=200)
def test_whole_and_streamed_answers_are_the_oracles(
    case: Case, usage: bool, continuous: bool
) -> None:
    check_whole(case, ask(case, {}))
    options = {"include_usage": usage, "continuous_usage_stats": continuous}
    reply = ask(case, {"stream": True, "stream_options": options})
    check_stream(case, reply, usage=usage, continuous=continuous)
