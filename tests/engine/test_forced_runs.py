"""What a grammar leaves no choice about is the same whether it is taken in at once or sampled."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from jaxserve.device.arena import distances, pack
from jaxserve.engine.step_times import StepTimes
from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.forced import canonical
from jaxserve.guided.guide import MatcherGuide, TablesGuide
from jaxserve.guided.host import HostMatcher, HostTokenizer
from jaxserve.guided.tables import GrammarSpec, HostGrammar, TokenTables
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
from tests.grammars import CONTROL_ID, END_ID, longest_first, spelled, tiny_vocabulary

VOCAB = 1024
VOCABULARY = tiny_vocabulary()
ENDS = frozenset({END_ID, CONTROL_ID + 2})
HOT = SamplingParams(max_tokens=1, seed=5, temperature=1.0, stop_token_ids=ENDS)
GREEDY = replace(HOT, temperature=0.0)

SCHEMAS = [
    '{"const": "the name abc, the kind abc"}',
    '{"enum": ["the kind of it", "the name of it", "abc"]}',
    '{"const": {"kind": "日本 abc", "name": [1, 12, null]}}',
    '{"type": "object", "properties": {"the name": {"type": "boolean"}, "a kind": {"enum": [1, 2]},'
    ' "long name of it": {"type": "null"}}, "required": ["the name", "a kind", "long name of it"]}',
    '{"type": "object", "properties": {"kind": {"enum": ["é", "è"]}, "abcabc": {"type": "null"}},'
    ' "required": ["abcabc"]}',
    '{"type": "array", "items": {"type": "object", "properties": {"identifier": {"type":'
    ' "boolean"}}, "required": ["identifier"]}, "minItems": 2, "maxItems": 3}',
    '{"anyOf": [{"const": "the name"}, {"type": "null"}, {"const": {"aaaa": "bbbb"}}]}',
]


def encode(text: str) -> list[int]:
    return longest_first(VOCABULARY, text)


@cache
def grammar_of(source: str, *, on_device: bool = True, trigger: int | None = None) -> Grammar:
    tables = compile_grammar(
        GrammarSpec(kind="json_schema", source=source, compact=True), VOCABULARY
    )
    if isinstance(tables, HostGrammar):
        matcher = HostMatcher(HostTokenizer(VOCABULARY), tables)
        return Grammar(start=lambda: MatcherGuide(matcher.copy(), num_words=VOCAB // 32))
    assert isinstance(tables, TokenTables)
    if trigger is not None:
        tables = triggered(tables, trigger, vocab_size=VOCAB)
    made, id_S = canonical(tables, encode)
    distance_S = distances(made)
    image = pack(made, f"{source}{trigger}", VOCAB, PLAN.arena_rows) if on_device else None
    assert image is not None or not on_device
    return Grammar(start=lambda: TablesGuide(made, distance_S, id_S), image=image)


def guided(
    name: str,
    source: str,
    sampling: SamplingParams = HOT,
    *,
    max_tokens: int = 60,
    on_device: bool = True,
    trigger: int | None = None,
    ensures_complete: bool = False,
) -> GenerationRequest:
    request = request_of(name, prompt_of(20, len(name)), max_tokens, sampling)
    guidance = Guidance(
        grammar=grammar_of(source, on_device=on_device, trigger=trigger),
        end_ids=sampling.stop_token_ids or ENDS,
        ensures_complete=ensures_complete,
    )
    return replace(request, guidance=guidance)


@pytest.fixture
def extends_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all forced runs pay, for which this machine's times are no matter."""
    monkeypatch.setattr(StepTimes, "extend_s", lambda *_: 0.0)
    monkeypatch.setattr(StepTimes, "decode_s", lambda *_: 1.0)


def run(model: TinyModel, request: GenerationRequest) -> tuple[TinyEngine, int]:
    """Return the engine that a request had to itself, and how many steps it took."""
    engine = TinyEngine(model.runner)
    engine.run(request)
    return engine, len(engine.core.host_times)


@pytest.mark.usefixtures("extends_cost_nothing")
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "seeded"])
def test_the_ids_are_those_that_are_sampled_and_steps_are_fewer(
    e2b: TinyModel, sampling: SamplingParams, num_compiles: Callable[[], int]
) -> None:
    compiles = num_compiles()
    for number, source in enumerate(SCHEMAS):
        request = guided(f"r{number}", source, replace(sampling, seed=number))
        sampled = run_alone(e2b.runner, request, forces_runs=False)

        engine, num_steps = run(e2b, request)

        assert engine.tokens_of(request.request_id) == sampled
        stats = engine.finished(request.request_id).stats
        assert stats.num_output_tokens == len(sampled)
        assert stats.num_forced_tokens > 0
        # A pass a step, one for the step beyond the end, and one that only reads that.
        assert num_steps == len(sampled) - stats.num_forced_tokens + 2
        told = f"jaxserve_guided_forced_tokens_total {float(stats.num_forced_tokens)}"
        assert told in engine.metrics.render().decode()
        again = run_alone(e2b.runner, guided(f"r{number}", source, request.sampling))
        assert again == sampled
    assert num_compiles() == compiles


@pytest.mark.usefixtures("extends_cost_nothing")
def test_an_answer_that_is_all_forced_takes_one_step_for_its_end(e2b: TinyModel) -> None:
    engine, num_steps = run(e2b, guided("c", SCHEMAS[0]))
    ids = engine.tokens_of("c")
    assert spelled(VOCABULARY, ids[:-1]) == '"the name abc, the kind abc"'
    assert (ids[-1] in ENDS, num_steps) == (True, 3)


@pytest.mark.usefixtures("extends_cost_nothing")
def test_company_preemption_and_all_that_counts_ids_change_no_id(
    e2b: TinyModel, num_compiles: Callable[[], int]
) -> None:
    counted = replace(
        HOT, frequency_penalty=1.5, repetition_penalty=1.7, bad_words=((65, 66), (300,)), seed=9
    )
    biased = replace(HOT, min_tokens=8, presence_penalty=1.0, logit_bias=((97, 3.0), (34, -2.0)))
    told = replace(HOT, num_logprobs=2, num_prompt_logprobs=1)
    requests = [guided(f"g{i}", source) for i, source in enumerate(SCHEMAS)]
    requests += [
        guided("counted", SCHEMAS[3], counted),
        guided("counted5", SCHEMAS[5], counted),
        guided("biased", SCHEMAS[6], biased),
        guided("told", SCHEMAS[3], told),
        guided("host", SCHEMAS[5], on_device=False),
        guided("greedy", SCHEMAS[4], GREEDY),
        guided("in-time", SCHEMAS[5], max_tokens=40, ensures_complete=True),
        guided("scored", SCHEMAS[3], replace(HOT, num_prompt_logprobs=1)),
        guided(
            "call", SCHEMAS[3], replace(HOT, logit_bias=((CONTROL_ID, 9.0),)), trigger=CONTROL_ID
        ),
    ]
    requests[2:2] = [request_of(f"free{i}", prompt_of(25, i), 60, HOT) for i in range(3)]
    compiles = num_compiles()
    alone = {r.request_id: run_alone(e2b.runner, r, forces_runs=False) for r in requests}

    engine = TinyEngine(e2b.runner, Sizes(num_pages=21))
    for i, request in enumerate(requests):
        engine.add(request)
        if i == 2:
            engine.step()
    engine.run_until_idle()

    assert {name: engine.tokens_of(name) for name in alone} == alone
    assert engine.num_preemptions > 0
    forced = {name: engine.finished(name).stats.num_forced_tokens for name in alone}
    assert forced["told"] == forced["free0"] == 0
    assert min(forced[name] for name in ("counted", "biased", "host", "in-time", "scored")) > 0
    assert len(engine.logprobs_of("told")) == len(alone["told"])
    assert forced["call"] > 0
    assert num_compiles() == compiles


@pytest.mark.usefixtures("extends_cost_nothing")
def test_a_budget_ends_within_forced_text(e2b: TinyModel) -> None:
    whole = run_alone(e2b.runner, guided("b", SCHEMAS[0]), forces_runs=False)
    for max_tokens in (1, 2, 3, len(whole) - 1, len(whole)):
        engine, _ = run(e2b, guided("b", SCHEMAS[0], max_tokens=max_tokens))
        end = engine.finished("b")
        assert engine.tokens_of("b") == whole[:max_tokens]
        assert end.stats.num_output_tokens == max_tokens
        assert end.reason == ("stop" if max_tokens == len(whole) else "length")


@pytest.mark.usefixtures("extends_cost_nothing")
def test_a_grammar_with_a_stack_forces_its_text_as_well(e2b: TinyModel) -> None:
    pytest.importorskip("llguidance")
    tree = (
        '{"type": "object", "properties": {"identifier": {"type": "boolean"}, "next": {"anyOf":'
        ' [{"$ref": "#"}, {"type": "null"}]}}, "required": ["identifier", "next"]}'
    )
    for seed in range(4):
        request = guided("s", tree, replace(HOT, seed=seed), on_device=False)
        engine, _ = run(e2b, request)
        assert engine.tokens_of("s") == run_alone(e2b.runner, request, forces_runs=False)
        assert engine.finished("s").stats.grammar_path == "host"
        assert engine.finished("s").stats.num_forced_tokens > 0


@pytest.mark.usefixtures("extends_cost_nothing")
def test_what_was_forced_is_cached_for_who_comes_next(e2b: TinyModel) -> None:
    engine = TinyEngine(e2b.runner)
    for name in ("first", "again"):
        request = replace(guided("x", SCHEMAS[3]), request_id=name)
        engine.run(request)
    assert engine.tokens_of("again") == engine.tokens_of("first")
    cached = engine.finished("again").stats.num_cached_tokens
    # Of the prompt alone, though ids behind it are cached as well.
    assert 0 < cached <= len(prompt_of(20, 1))
