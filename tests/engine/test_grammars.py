"""Sequences with a grammar on the real loop and runner: alone, in company, early and late."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.device.arena import distances, pack
from jaxserve.guided.guide import TablesGuide
from jaxserve.guided.masks import packed
from jaxserve.guided.tables import TokenTables
from jaxserve.guided.triggered import triggered
from jaxserve.types import (
    GenerationRequest,
    Grammar,
    Guidance,
    SamplingParams,
)
from tests.engine.tiny import (
    PLAN,
    Sizes,
    TinyEngine,
    TinyModel,
    prompt_of,
    request_of,
    run_alone,
)
from tests.guided_tables import random_tables, words_of

VOCAB = 1024
ENDS = frozenset({1, 106})
HOT = SamplingParams(max_tokens=1, seed=5, temperature=1.0, stop_token_ids=ENDS)
MAX_TOKENS = 40

Path = str


def grammar_of(tables: TokenTables, key: str, *, on_host: bool = False) -> Grammar:
    image = None if on_host else pack(tables, key, VOCAB, PLAN.arena_rows)
    assert on_host or image is not None
    distance_S = distances(tables)
    return Grammar(start=lambda: TablesGuide(tables, distance_S), image=image)


def guided(
    name: str,
    tables: TokenTables,
    sampling: SamplingParams = HOT,
    *,
    on_host: bool = False,
    max_tokens: int = MAX_TOKENS,
    ensures_complete: bool = False,
    key: str | None = None,
) -> GenerationRequest:
    request = request_of(name, prompt_of(20, len(name)), max_tokens, sampling)
    guidance = Guidance(
        grammar=grammar_of(tables, key or name, on_host=on_host),
        end_ids=sampling.stop_token_ids or ENDS,
        ensures_complete=ensures_complete,
    )
    return replace(request, guidance=guidance)


def on_host(request: GenerationRequest) -> GenerationRequest:
    """Return the same request, whose grammar the device does not get."""
    guidance = request.guidance
    assert guidance is not None
    return replace(
        request, guidance=replace(guidance, grammar=replace(guidance.grammar, image=None))
    )


def assert_kept(tables: TokenTables, ids: tuple[int, ...], max_tokens: int = MAX_TOKENS) -> None:
    """Check that ids walk through a grammar to an end, or to the end of their budget."""
    state = 0
    for i, token_id in enumerate(ids):
        if token_id in ENDS:
            assert tables.accepting_S[state]
            assert i == len(ids) - 1
            return
        state = tables.advance(state, token_id)
        assert state >= 0
    assert len(ids) == max_tokens


def path_of(engine: TinyEngine, name: str) -> Path | None:
    return engine.finished(name).stats.grammar_path


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_device_and_host_give_the_same_tokens(e2b: TinyModel, temperature: float) -> None:
    num_ended = 0
    for seed in range(8):
        tables = random_tables(seed, vocab_size=VOCAB, num_special=110)
        sampling = replace(HOT, seed=seed, temperature=temperature)
        request = guided(f"r{seed}", tables, sampling)

        ids = run_alone(e2b.runner, request)

        assert_kept(tables, ids)
        assert run_alone(e2b.runner, on_host(request)) == ids
        num_ended += ids[-1] in ENDS
    assert num_ended > 2


def test_company_preemption_and_place_change_no_token(
    e2b: TinyModel, num_compiles: Callable[[], int]
) -> None:
    grammars = [random_tables(seed, vocab_size=VOCAB, num_special=110) for seed in range(10, 16)]
    requests = [guided(f"g{i}", tables) for i, tables in enumerate(grammars)]
    requests += [guided(f"h{i}", tables, on_host=True) for i, tables in enumerate(grammars[:2])]
    penalized = replace(HOT, frequency_penalty=1.5, top_k=50, top_p=0.9, num_logprobs=2)
    requests.append(guided("p", grammars[0], penalized, key="g0"))
    plain = [request_of(f"u{i}", prompt_of(30 + i), 30, replace(HOT, seed=i)) for i in range(3)]
    requests += [*plain, request_of("greedy", prompt_of(25), 30)]
    compiles = num_compiles()
    alone = {request.request_id: run_alone(e2b.runner, request) for request in requests}

    # Few pages: some are preempted; eight slots and a small arena: some find no room in it.
    engine = TinyEngine(e2b.runner, Sizes(num_pages=33))
    for i, request in enumerate(requests):
        engine.add(request)
        if i % 3 == 0:
            engine.step()
    engine.run_until_idle()

    assert {name: engine.tokens_of(name) for name in alone} == alone
    assert engine.num_preemptions > 0
    paths = {name: path_of(engine, name) for name in alone}
    assert {paths[f"h{i}"] for i in range(2)} == {"host"}
    assert "device" in {paths[f"g{i}"] for i in range(6)}
    assert {paths[f"u{i}"] for i in range(3)} == {None}
    assert num_compiles() == compiles


def test_what_finds_no_room_in_the_arena_is_guided_from_the_host(e2b: TinyModel) -> None:
    num_rows = PLAN.arena_rows
    large = [
        random_tables(seed, vocab_size=VOCAB, num_states=30, num_special=110) for seed in (1, 2, 3)
    ]
    requests = [guided(f"large{i}", tables) for i, tables in enumerate(large)]
    images = [request.guidance.grammar.image for request in requests if request.guidance]
    sizes = [len(image.rows_NR) + 1 for image in images if image is not None]
    assert sum(sizes[:2]) <= num_rows - 1 < sum(sizes)
    engine = TinyEngine(e2b.runner)
    engine.run(*requests)

    assert [path_of(engine, request.request_id) for request in requests] == [
        "device",
        "device",
        "host",
    ]
    for tables, request in zip(large, requests, strict=True):
        assert_kept(tables, engine.tokens_of(request.request_id))
    # Nobody uses them any more.
    again = TinyEngine(e2b.runner)
    again.run(requests[2])
    assert path_of(again, "large2") == "device"
    rendered = engine.metrics.render().decode()
    assert 'jaxserve_guided_requests_total{path="device"} 2.0' in rendered
    assert 'jaxserve_guided_requests_total{path="host"} 1.0' in rendered


def test_no_bias_breaks_a_grammar(e2b: TinyModel) -> None:
    tables = words_of((200, 201, 202), (200, 203), vocab_size=VOCAB)
    biases = [
        {1: 100.0, 106: 100.0},
        {1: -100.0, 106: -100.0, 202: -100.0},
        {200: -100.0, 7: 100.0},
    ]
    for i, bias in enumerate(biases):
        sampling = replace(HOT, logit_bias=tuple(bias.items()), repetition_penalty=1e-9)
        ids = run_alone(e2b.runner, guided(f"b{i}", tables, sampling))
        assert ids[:-1] in {(200, 201, 202), (200, 203)}
        assert ids[-1] in ENDS
    nothing_left = replace(HOT, allowed_token_ids=frozenset({9}), bad_words=((200,), (203,)))
    ids = run_alone(e2b.runner, guided("n", tables, nothing_left))
    assert ids[:-1] in {(200, 201, 202), (200, 203)}


def test_ends_follow_the_end_where_they_do_not_count(e2b: TinyModel) -> None:
    tables = words_of((200, 201), vocab_size=VOCAB)
    for late in (replace(HOT, stop_token_ids=frozenset()), replace(HOT, min_tokens=6)):
        request = guided("i", tables, late, max_tokens=9)
        ids = run_alone(e2b.runner, request)
        assert run_alone(e2b.runner, on_host(request)) == ids
        assert ids[:2] == (200, 201)
        assert set(ids[2:]) <= ENDS
        # There is nothing else to do than to end; but what ignores ends goes on with them.
        assert len(ids) == (9 if not late.stop_token_ids else 3)


def test_min_tokens_keep_a_text_open_that_may_go_on(e2b: TinyModel) -> None:
    loop = random_tables(3, vocab_size=VOCAB, num_states=3, num_classes=3, num_special=110)
    tables = replace(
        loop,
        next_SC=np.where(np.arange(3) > 0, np.int16(0), np.int16(-1))[None].astype(np.int16),
        mask_id_S=np.zeros(1, np.int32),
        masks_DW=packed(loop.class_of_V > 0)[None],
        accepting_S=np.ones(1, np.bool_),
    )
    sampling = replace(HOT, min_tokens=12, logit_bias=((1, 100.0), (106, 100.0)))
    ids = run_alone(e2b.runner, guided("m", tables, sampling))
    assert len(ids) == 13
    assert not ENDS.intersection(ids[:-1])


def test_a_text_is_complete_when_its_budget_ends(e2b: TinyModel) -> None:
    num_cut = 0
    for seed in range(4):
        tables = random_tables(seed, vocab_size=VOCAB, num_states=40, num_special=110)
        least = int(distances(tables)[0])
        for max_tokens in (least, least + 1, least + 4):
            name = f"c{seed}.{max_tokens}"
            request = guided(name, tables, max_tokens=max_tokens, ensures_complete=True)
            ids = run_alone(e2b.runner, request)
            assert ids[-1] in ENDS
            assert_kept(tables, ids)
            assert run_alone(e2b.runner, on_host(request)) == ids
            open_ids = run_alone(e2b.runner, guided(name, tables, max_tokens=max_tokens))
            num_cut += open_ids[-1] not in ENDS
    assert num_cut > 0


def test_a_grammar_that_begins_in_mid_stream_leaves_the_rest_alone(e2b: TinyModel) -> None:
    inner = words_of((200, 201, 202), (203,), vocab_size=VOCAB)
    prompt = prompt_of(20, 1)
    free = run_alone(e2b.runner, request_of("f", prompt, 30, replace(HOT, seed=1)))
    trigger = free[10]
    assert trigger not in free[:10]
    tables = triggered(inner, trigger, vocab_size=VOCAB)
    request = replace(
        request_of("t", prompt, 30, replace(HOT, seed=1)),
        guidance=Guidance(grammar=grammar_of(tables, "t"), end_ids=ENDS),
    )
    ids = run_alone(e2b.runner, request)
    assert run_alone(e2b.runner, on_host(request)) == ids
    assert ids[:11] == free[:11]
    behind = next(n for n in (1, 3) if ids[11 : 11 + n] in {(200, 201, 202), (203,)})
    assert not set(ids[11 + behind :]) <= ENDS


def test_an_aborted_sequence_leaves_its_grammars_rows_to_others(e2b: TinyModel) -> None:
    tables = random_tables(1, vocab_size=VOCAB, num_states=30, num_special=110)
    engine = TinyEngine(e2b.runner)
    engine.add(guided("a", tables))
    engine.step()
    engine.abort("a")
    engine.run_until_idle()
    for i in range(5):
        name = f"large{i}"
        others = random_tables(20 + i, vocab_size=VOCAB, num_states=30, num_special=110)
        engine.run(guided(name, others))
        assert path_of(engine, name) == "device"
        assert_kept(others, engine.tokens_of(name))
