"""An engine that follows a script, and a model whose tokens are bytes: token id 6 + b is byte b.

ASCII bytes are ordinary tokens, the others byte-fallback ones: their text waits for the run's end.
`Script.say("hi")` is three steps: "h", "i", the end id. So every answer can be worked out by hand.

Where a request asks for log-probabilities, each token, of answer or prompt, has those of `score`.
"""

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from jaxserve.engine.client import EngineStatus
from jaxserve.errors import ApiError
from jaxserve.http.served_model import ServedModel
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import (
    MAX_LOGPROBS,
    EndedBy,
    FinishReason,
    GenerationRequest,
    OutputEvent,
    PromptOutput,
    RequestFailed,
    RequestFinished,
    RequestStats,
    SamplingDefaults,
    TokenLogprobs,
    TokenOutput,
)

DATA = Path(__file__).parent / "data"
PAD, EOS, BOS, UNK, END_OF_TURN, IMAGE = range(6)
_SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<end>", "<image>"]
_FIRST_BYTE = len(_SPECIALS)
VOCAB_SIZE = _FIRST_BYTE + 256
READY = EngineStatus(phase="ready")

# Of Gemma 4's turns; a model that has them has them behind its bytes.
MARKERS = [
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
]
MARKER_IDS = {spelling: VOCAB_SIZE + i for i, spelling in enumerate(MARKERS)}
_AROUND_MARKERS = re.compile(f"({'|'.join(map(re.escape, MARKERS))})")

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[model]{% endif %}"
)


def ids(text: str | bytes) -> tuple[int, ...]:
    """The token ids of a text, without BOS."""
    data = text.encode() if isinstance(text, str) else text
    return tuple(_FIRST_BYTE + byte for byte in data)


def turn_ids(text: str) -> tuple[int, ...]:
    """The token ids of a text in which markers are spelled out."""
    pieces = _AROUND_MARKERS.split(text)
    return tuple(
        token_id
        for piece in pieces
        for token_id in ([MARKER_IDS[piece]] if piece in MARKER_IDS else ids(piece))
    )


# The likeliest first: bytes and control tokens too, since they are spelled in ways of their own.
LIKELIEST = (*ids("ab"), _FIRST_BYTE + 0xC3, EOS, *ids("cdefghijklmnopqr"))


def score(token_id: int, num_top: int = MAX_LOGPROBS) -> TokenLogprobs:
    """Say how likely an id is, everywhere: the r-th likeliest has -r, another one -100 - id."""
    ranks = {likely: rank for rank, likely in enumerate(LIKELIEST, start=1)}
    top = LIKELIEST[:num_top]
    return TokenLogprobs(
        token_id,
        float(-ranks.get(token_id, 100 + token_id)),
        ranks.get(token_id, 100 + token_id),
        top,
        tuple(float(-ranks[likely]) for likely in top),
    )


def byte_model(folder: Path, *, max_model_len: int = 1000, is_gemma4: bool = False) -> ServedModel:
    """Write the text side of a checkpoint into `folder` and load it.

    `is_gemma4`: with the markers of Gemma 4's turns, and a template that knows them.
    """
    specials = [*enumerate(_SPECIALS)]
    template = _CHAT_TEMPLATE
    if is_gemma4:
        specials += [(token_id, spelling) for spelling, token_id in MARKER_IDS.items()]
        template = (DATA / "gemma4_chat" / "chat_template.jinja").read_text()
    vocab = {name: i for i, name in enumerate(_SPECIALS)}
    vocab |= {_piece(byte): _FIRST_BYTE + byte for byte in range(256)}
    vocab |= {name: i for i, name in specials}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, name in specials
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(template)
    return ServedModel(
        id="org/byte-model",
        tokenizer=Tokenizer.load(folder),
        chat_template=ChatTemplate.load(folder),
        vocab_size=len(vocab),
        max_model_len=max_model_len,
        end_token_ids=frozenset({EOS, MARKER_IDS["<turn|>"] if is_gemma4 else END_OF_TURN}),
        placeholder_token_ids=frozenset({IMAGE}),
        created=1_700_000_000,
        defaults=SamplingDefaults(),
    )


def _piece(byte: int) -> str:
    return chr(byte).replace(" ", "▁") if byte < 0x80 else f"<0x{byte:02X}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one sequence does.

    Attributes:
        steps: the ids of each step.
        end: how it ends after them; None: not before it is aborted.
        delay_s: time before each event.
        scores_per_event: how many of the prompt's tokens one event scores, where that is asked for.
    """

    steps: tuple[tuple[int, ...], ...] = ()
    end: FinishReason | Exception | None = "stop"
    cached_tokens: int = 0
    delay_s: float = 0.0
    scores_per_event: int = 2

    @classmethod
    def say(
        cls,
        text: str,
        *,
        ids_per_step: int = 1,
        cached_tokens: int = 0,
        end: FinishReason = "stop",
    ) -> Self:
        """Generate a text, in which markers may be spelled out, and an end id.

        Where it does not `end` with stop, there is no end id.
        """
        tokens = (*turn_ids(text), *((EOS,) if end == "stop" else ()))
        steps = (tokens[i : i + ids_per_step] for i in range(0, len(tokens), ids_per_step))
        return cls(steps=tuple(steps), cached_tokens=cached_tokens, end=end)


class FakeStream:
    """One scripted sequence."""

    def __init__(self, engine: "FakeEngine", request: GenerationRequest, script: Script) -> None:
        self._engine = engine
        self._request = request
        self._script = script
        self._steps = deque(script.steps)
        scored = () if request.sampling.num_prompt_logprobs is None else request.prompt_ids[1:]
        size = script.scores_per_event
        self._prompt = deque(scored[i : i + size] for i in range(0, len(scored), size))
        self._num_output_tokens = 0
        self._is_over = False
        self._aborted = asyncio.Event()
        self._ended_by: EndedBy = "abort"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputEvent:
        if self._is_over:
            raise StopAsyncIteration
        await asyncio.sleep(self._script.delay_s)
        sampling = self._request.sampling
        if self._prompt and not self._aborted.is_set():
            scores = _scores(self._prompt.popleft(), sampling.num_prompt_logprobs)
            return PromptOutput(self._request.request_id, scores)
        if self._steps and not self._aborted.is_set():
            step = self._steps.popleft()
            num_cached = None if self._num_output_tokens else self._script.cached_tokens
            self._num_output_tokens += len(step)
            scores = _scores(step, sampling.num_logprobs)
            return TokenOutput(self._request.request_id, step, scores, num_cached)
        end = self._script.end
        if end is None:
            await self._aborted.wait()
        self._is_over = True
        self._engine.live.discard(self._request.request_id)
        if self._aborted.is_set():
            return self._finished(self._ended_by)
        if isinstance(end, ApiError):
            return RequestFailed(self._request.request_id, end)
        if isinstance(end, Exception):
            raise end
        return self._finished(end or "abort")

    def abort(self, reason: EndedBy = "abort") -> None:
        if not self._is_over and not self._aborted.is_set():
            self._engine.note_abort(self._request.request_id, reason)
            self._ended_by = reason
        self._aborted.set()

    def _finished(self, reason: FinishReason) -> RequestFinished:
        has_begun = self._num_output_tokens > 0
        stats = RequestStats(
            num_prompt_tokens=len(self._request.prompt_ids),
            num_cached_tokens=self._script.cached_tokens,
            num_output_tokens=self._num_output_tokens,
            queue_s=0.001 if has_begun else None,
            ttft_s=0.002 if has_begun else None,
            total_s=0.003,
        )
        return RequestFinished(self._request.request_id, reason, stats)


def _scores(token_ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    return () if num_top is None else tuple(score(token_id, num_top) for token_id in token_ids)


class FakeEngine:
    """Plays one script per sequence, in order of submission, the last one for all that follow.

    Attributes:
        requests: all that was submitted.
        live: ids of sequences that have neither ended nor been aborted.
        aborted: ids of sequences aborted while they lived; `abort_reasons` says why.
        refusals: raised by the next submissions, one each; None lets one pass.
        cached: what `explain` answers.
        cache_calls: what else was asked of the cache; it has 7 pages each time.
    """

    def __init__(self, *scripts: Script, status: EngineStatus = READY) -> None:
        self._scripts = scripts or (Script.say("ok"),)
        self.status = status
        self.requests: list[GenerationRequest] = []
        self.live: set[str] = set()
        self.aborted: list[str] = []
        self.abort_reasons: list[EndedBy] = []
        self.refusals: deque[Exception | None] = deque()
        self.cached: tuple[int, tuple[int, ...]] = (0, ())
        self.cache_calls: list[object] = []
        self._news = asyncio.Event()

    async def flush_cache(self) -> int:
        self.cache_calls.append("flush")
        return 7

    async def release_session(self, session: str) -> int:
        self.cache_calls.append(("release", session))
        return 7

    async def explain(self, salt: str | None, ids: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        self.cache_calls.append(("explain", salt, ids))
        return self.cached

    def keep(self, salt: str | None, ids: tuple[int, ...]) -> None:
        self.cache_calls.append(("keep", salt, ids))

    def submit(self, requests: Sequence[GenerationRequest]) -> list[FakeStream]:
        if self.refusals and (refusal := self.refusals.popleft()) is not None:
            raise refusal
        return [self._play(request) for request in requests]

    def _play(self, request: GenerationRequest) -> FakeStream:
        script = self._scripts[min(len(self.requests), len(self._scripts) - 1)]
        self.requests.append(request)
        self.live.add(request.request_id)
        self._news.set()
        return FakeStream(self, request, script)

    def note_abort(self, request_id: str, reason: EndedBy) -> None:
        self.aborted.append(request_id)
        self.abort_reasons.append(reason)
        self.live.discard(request_id)
        self._news.set()

    async def until_submitted(self, count: int = 1) -> None:
        """Wait until there have been `count` submissions."""
        await self._until(lambda: len(self.requests) >= count)

    async def until_aborted(self, count: int = 1) -> None:
        """Wait until `count` sequences have been aborted."""
        await self._until(lambda: len(self.aborted) >= count)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 5)

    @property
    def prompts(self) -> Sequence[tuple[int, ...]]:
        return [request.prompt_ids for request in self.requests]
