"""Test doubles of the engine's neighbours, simple enough to work out by hand."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jaxserve.device.buckets import ExtendBucket, ExtendChunk
from jaxserve.engine.scheduler import Scheduler
from jaxserve.models.config import AttentionKind
from jaxserve.types import (
    GenerationRequest,
    Grammar,
    Guidance,
    OutputEvent,
    SamplingParams,
    TokenLogprobs,
)
from tests.driven_engine import DrivenEngine

FAKE_VOCAB_SIZE = 97
FAKE_BUCKETS = (
    ExtendBucket(tokens=8, block=4),
    ExtendBucket(tokens=16, block=4),
    ExtendBucket(tokens=32, block=8),
)


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


def fake_next_token(token_ids: Sequence[int], seed: int) -> int:
    """Return the id that FakeRunner samples after these.

    h = seed mod 100,003; then h = (31 h + id + 1) mod 100,003 for each id in order; the answer is h
    mod 97. After [4, 7] with seed 2: 31 * 2 + 5 = 67; 31 * 67 + 8 = 2085; 2085 mod 97 = 48.
    """
    h = seed % 100_003
    for token_id in token_ids:
        h = (31 * h + token_id + 1) % 100_003
    return h % FAKE_VOCAB_SIZE


class FakeGuide:
    """Where an answer is in a grammar that forces some of its places, which are its states."""

    may_end = False

    def __init__(self, forced: Mapping[int, int]) -> None:
        self._forced = forced
        self.state = 0

    def allowed_words(self, max_left: int | None = None) -> npt.NDArray[np.uint32]:
        raise AssertionError("nobody was told that masks are needed")

    def forced_ids(self, limit: int) -> Sequence[int]:
        ids: list[int] = []
        while len(ids) < limit and (state := self.state + len(ids)) in self._forced:
            ids.append(self._forced[state])
        return ids

    def advance(self, token_id: int) -> None:
        assert self._forced.get(self.state, token_id) == token_id
        self.state += 1


def fake_guidance(forced: Mapping[int, int], end_ids: Iterable[int] = ()) -> Guidance:
    """Make a grammar of an answer that forces the ids at these places."""
    return Guidance(grammar=Grammar(start=lambda: FakeGuide(forced)), end_ids=frozenset(end_ids))


def fake_generate(
    prompt_ids: Sequence[int], sampling: SamplingParams, forced: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """All output ids of a sequence that runs alone: what every schedule has to give.

    `forced`: ids that a grammar leaves no choice about, by their places in the answer.
    """
    token_ids = list(prompt_ids)
    for place in range(sampling.max_tokens):
        token_id = fake_next_token(token_ids, sampling.seed)
        token_ids.append((forced or {}).get(place, token_id))
        if token_ids[-1] in sampling.stop_token_ids:
            break
    return tuple(token_ids[len(prompt_ids) :])


def fake_logprobs(token_id: int) -> TokenLogprobs:
    """Return what the fake model says of a token: three likeliest, itself first."""
    return TokenLogprobs(
        token_id, -token_id / 8, 1, (token_id, 5, 6), (-token_id / 8, -20.0, -21.0)
    )


@dataclass(eq=False)
class FakeSlot:
    """What the device keeps of a slot."""

    sampling: SamplingParams
    # Page-table entry -> page, by kind.
    tables: dict[AttentionKind, dict[int, int]] = field(
        default_factory=lambda: {"full": {}, "sliding": {}}
    )
    last_id: int | None = None
    # Of a grammar: its guide, where the next token is sampled.
    guidance: Guidance | None = None
    staged_state: int = 0
    state: int = 0
    num_counted: int = 0


class FakePendingTokens:
    """Ids of one call, to be read once and in call order; reading waits on the fake clock."""

    def __init__(
        self, runner: "FakeRunner", ids: list[int], done_s: float, targets: Sequence[int]
    ) -> None:
        self._runner = runner
        self._targets = targets
        self._ids = ids
        self._done_s = done_s

    def logprobs(self) -> list[TokenLogprobs]:
        return [fake_logprobs(token_id) for token_id in self._ids]

    def target_logprobs(self) -> list[TokenLogprobs]:
        return [fake_logprobs(token_id) for token_id in self._targets]

    def token_ids(self) -> list[int]:
        assert self._runner.unread.popleft() is self, "ids are read out of order, or twice"
        self._runner.clock.advance_to(self._done_s)
        self._runner.count_call("read")
        return self._ids


class FakeRunner:
    """A device whose KV stores map (page, offset) to a token id; its model is `fake_next_token`.

    What a row samples is worked out from all ids that it finds through its page tables at positions
    [0, p], those of the window in the sliding store, so a wrong page, position, slot, order or a
    page somebody else overwrote shows as a wrong id. Whatever is computed must find the window
    before it in the sliding store, as it is in the full one. What full-attention layers are said to
    have is not written, and must be there. Breaches of the runner's contract are AssertionErrors.
    Work is done when it is called,
    in call order, as a device would; `unread` holds the answers that the host has not read. Time: a
    call begins when the one before it is done and takes `extend_s_per_token` times its bucket's
    tokens, or `decode_s`.
    """

    def __init__(
        self,
        *,
        num_pages: int = 65,
        num_sliding_pages: int | None = None,
        window: int = 8,
        page_size: int = 4,
        num_slots: int = 4,
        max_model_len: int = 64,
        extend_buckets: tuple[ExtendBucket, ...] = FAKE_BUCKETS,
        clock: FakeClock | None = None,
        decode_s: float = 0.010,
        extend_s_per_token: float = 0.001,
    ) -> None:
        self.num_pages = num_pages
        self.num_sliding_pages = num_sliding_pages or num_pages
        self.window = window
        self.page_size = page_size
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.extend_buckets = extend_buckets
        self.clock = clock or FakeClock()
        self.decode_s = decode_s
        self.extend_s_per_token = extend_s_per_token
        self.unread: deque[FakePendingTokens] = deque()
        self.max_unread = 0
        self.calls: list[str] = []  # names of all calls: open_slot, set_pages, extend, decode, read
        self.fail_at: dict[str, int] = {}  # name -> the how-manieth of these calls raises
        self.decoded_slots: list[list[int]] = []
        self.extended: list[list[ExtendChunk]] = []
        self._slots: dict[int, FakeSlot] = {}
        # (page, offset) -> token id.
        self._stores: dict[AttentionKind, dict[tuple[int, int], int]] = {"full": {}, "sliding": {}}
        self._free_from_s = 0.0

    def count_call(self, name: str) -> None:
        self.calls.append(name)
        if self.calls.count(name) == self.fail_at.get(name):
            raise RuntimeError(f"the device failed in {name}")

    def open_slot(
        self,
        slot: int,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        self.count_call("open_slot")
        assert 0 <= slot < self.num_slots
        assert prompt_ids
        self._slots[slot] = FakeSlot(sampling, num_counted=len(prompt_ids) + len(output_ids))

    def set_pages(self, slot: int, start: int, pages: Sequence[int], kind: AttentionKind) -> None:
        self.count_call("set_pages")
        end = self.num_pages if kind == "full" else self.num_sliding_pages
        assert all(1 <= page < end for page in pages)
        assert (start + len(pages) - 1) * self.page_size < self.max_model_len
        self._slots[slot].tables[kind].update(enumerate(pages, start))

    def open_grammar(
        self,
        slot: int,
        guidance: Guidance,
        *,
        state: int,
        end_position: int,
        live_slots: Collection[int],
    ) -> bool:
        self.count_call("open_grammar")
        assert live_slots
        self._slots[slot].guidance = guidance
        self._slots[slot].staged_state = state
        return True

    def set_grammar_state(self, slot: int, state: int) -> None:
        self._slots[slot].staged_state = state

    def count_tokens(
        self,
        slot: int,
        sampling: SamplingParams,
        token_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        assert tuple(output_ids[-len(token_ids) :]) == tuple(token_ids)
        self._slots[slot].num_counted += len(token_ids)

    def write_masks(self, masks: Sequence[tuple[int, npt.NDArray[np.uint32]]]) -> None:
        raise AssertionError("nobody was told that masks are needed")

    def copy_pages(self, copies: Sequence[tuple[int, int, int, int]]) -> None:
        self.count_call("copy_pages")
        assert 0 < len(copies) <= self.num_slots
        for store, pairs in (
            (self._stores["full"], [(source, target) for source, target, _, _ in copies]),
            (self._stores["sliding"], [(source, target) for _, _, source, target in copies]),
        ):
            copied = {
                (target, offset): store[source, offset]
                for source, target in pairs
                for offset in range(self.page_size)
                if (source, offset) in store
            }
            store.update(copied)

    def extend(self, chunks: Sequence[ExtendChunk]) -> FakePendingTokens:
        self.count_call("extend")
        self.extended.append(list(chunks))
        lengths = [len(chunk.token_ids) for chunk in chunks]
        assert min(lengths) > 0
        assert len({chunk.slot for chunk in chunks}) == len(chunks)
        bucket = next((bucket for bucket in self.extend_buckets if bucket.fits(lengths)), None)
        assert bucket is not None, f"chunks of {lengths} tokens fit no bucket"
        for chunk in chunks:
            self._write(chunk.slot, chunk.start, chunk.token_ids, chunk.full_start)
        for chunk in chunks:
            self._check_window(chunk.slot, chunk.start)
        sampled = [
            self._sample(chunk.slot, chunk.start + len(chunk.token_ids))
            for chunk in chunks
            if chunk.sample and self._begin(chunk.slot)
        ]
        targets = chunks[0].targets
        if any(chunk.targets for chunk in chunks):
            assert len(chunks) == 1
            assert bucket == self.extend_buckets[0]
        return self._pending(sampled, self.extend_s_per_token * bucket.tokens, targets)

    def decode(self, slots: Sequence[int], positions: Sequence[int]) -> FakePendingTokens:
        self.count_call("decode")
        self.decoded_slots.append(list(slots))
        assert 0 < len(slots) == len(set(slots)) == len(positions) <= self.num_slots
        for slot, position in zip(slots, positions, strict=True):
            last_id = self._slots[slot].last_id
            assert last_id is not None, f"slot {slot} decodes before its prompt is computed"
            self._write(slot, position, [last_id])
            self._slots[slot].num_counted += 1
        for slot, position in zip(slots, positions, strict=True):
            self._check_window(slot, position)
        sampled = [
            self._sample(slot, position + 1)
            for slot, position in zip(slots, positions, strict=True)
        ]
        return self._pending(sampled, self.decode_s)

    def _begin(self, slot: int) -> bool:
        """Let an extend sample in the state that it was given."""
        self._slots[slot].state = self._slots[slot].staged_state
        return True

    def _cell(self, slot: int, position: int, kind: AttentionKind) -> tuple[int, int]:
        assert 0 <= position < self.max_model_len
        table = self._slots[slot].tables[kind]
        return table[position // self.page_size], position % self.page_size

    def _write(self, slot: int, start: int, token_ids: Sequence[int], full_start: int = 0) -> None:
        full, sliding = self._stores["full"], self._stores["sliding"]
        for position, token_id in enumerate(token_ids, start):
            sliding[self._cell(slot, position, "sliding")] = token_id
            if position >= full_start:
                full[self._cell(slot, position, "full")] = token_id
            else:
                assert full[self._cell(slot, position, "full")] == token_id

    def _read(self, slot: int, start: int, end: int, kind: AttentionKind) -> list[int]:
        store = self._stores[kind]
        return [store[self._cell(slot, position, kind)] for position in range(start, end)]

    def _check_window(self, slot: int, start: int) -> None:
        window = (slot, max(start - self.window + 1, 0), start + 1)
        assert self._read(*window, "full") == self._read(*window, "sliding")

    def _sample(self, slot: int, end: int) -> int:
        first = max(end - self.window, 0)
        token_ids = self._read(slot, 0, first, "full") + self._read(slot, first, end, "sliding")
        kept = self._slots[slot]
        assert kept.num_counted == len(token_ids), "not every id was counted, or one was twice"
        token_id = fake_next_token(token_ids, kept.sampling.seed)
        if kept.guidance is not None:
            guide = kept.guidance.grammar.start()
            assert isinstance(guide, FakeGuide)
            guide.state = kept.state
            token_id = next(iter(guide.forced_ids(1)), token_id)
            kept.state += 1
        kept.last_id = token_id
        return token_id

    def _pending(
        self, ids: list[int], duration_s: float, targets: Sequence[int] = ()
    ) -> FakePendingTokens:
        self._free_from_s = max(self._free_from_s, self.clock()) + duration_s
        pending = FakePendingTokens(self, ids, self._free_from_s, targets)
        self.unread.append(pending)
        self.max_unread = max(self.max_unread, len(self.unread))
        return pending


class SteppedEngine(DrivenEngine):
    """An engine on a FakeRunner."""

    def __init__(
        self,
        runner: FakeRunner | None = None,
        *,
        prefill_stall_factor: float = 1.5,
        reuses_prefixes: bool = True,
    ) -> None:
        self.runner = runner or FakeRunner()
        self.published: list[
            tuple[float, list[OutputEvent]]
        ] = []  # time and events of each publish
        scheduler = Scheduler(
            self.runner,
            prefill_stall_factor=prefill_stall_factor,
            reuses_prefixes=reuses_prefixes,
        )
        super().__init__(self.runner, scheduler, self.runner.clock)

    def _keep(self, events: list[OutputEvent]) -> None:
        self.published.append((self.runner.clock(), events))
        super()._keep(events)

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        *,
        seed: int = 0,
        stop_token_ids: Iterable[int] = (),
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        priority: int = 0,
        session: str | None = None,
        cache_salt: str | None = None,
        resume_points: Iterable[int] = (),
        forced: Mapping[int, int] | None = None,
    ) -> GenerationRequest:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=frozenset(stop_token_ids),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )
        request = GenerationRequest(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            priority=priority,
            session=session,
            cache_salt=cache_salt,
            resume_points=tuple(resume_points),
            guidance=None if forced is None else fake_guidance(forced, sampling.stop_token_ids),
        )
        self.add(request, arrival_s=self.runner.clock())
        return request
