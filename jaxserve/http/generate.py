"""From a parsed request with its prompts to the response: sequences out, an answer back."""

import asyncio
import time
from collections.abc import Callable, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxserve import logs
from jaxserve.errors import InvalidRequestError, UnavailableError
from jaxserve.guided.triggered import Forced
from jaxserve.http.answer_parts import TurnPlan
from jaxserve.http.answers import AnswerWriter
from jaxserve.http.choice import ChoiceText, PromptScores
from jaxserve.http.config import HttpConfig
from jaxserve.http.disconnect import run_while_connected
from jaxserve.http.generation import Generation, Generator
from jaxserve.http.guidance import AnswerGrammar, AnswerGrammars, guidance, guide
from jaxserve.http.middleware import SUMMARY
from jaxserve.http.prompts import Echo, EncodedPrompt
from jaxserve.http.scores import ToldPrompts, check_scores
from jaxserve.http.sequences import plan_sequences
from jaxserve.http.served_model import ServedModel
from jaxserve.http.sse import EventStreamResponse
from jaxserve.http.thought_budget import ThoughtBudget, closers
from jaxserve.metrics import Metrics
from jaxserve.openai.logprobs import LogprobsWriter
from jaxserve.openai.options import GenerationOptions
from jaxserve.openai.readers import Name
from jaxserve.openai.responses import Answer
from jaxserve.text.stop_strings import StopAutomaton
from jaxserve.types import GenerationRequest, Grammar, Guidance

_SESSION_HEADER = "X-Session-ID"


async def generate(
    http: HttpRequest,
    engine: Generator,
    model: ServedModel,
    config: HttpConfig,
    *,
    kind: type[Answer],
    prompts: Sequence[EncodedPrompt],
    echoes: Sequence[Echo],
    options: GenerationOptions,
    metrics: Metrics,
    turns: TurnPlan | None = None,
    on_answer: Callable[[GenerationRequest, ChoiceText], None] | None = None,
) -> Response:
    """Generate `n` answers to each prompt; a stream is sent when the response is.

    `on_answer` gets each that is complete.
    """
    request_id = logs.request_id.get()
    check_scores(prompts, options, kind)
    id_lists = [prompt.token_ids for prompt in prompts]
    requests = plan_sequences(
        id_lists, options, model, kind, request_id=request_id, session=session_of(options, http)
    )
    if turns is not None:
        requests = [turns.fit(request) for request in requests]
    grammars = AnswerGrammars(
        grammars=model.grammars,
        plan=turns,
        prompt_ids=id_lists[0],
        stop_ids=options.stop_token_ids,
    )
    loop = asyncio.get_running_loop()
    due_s = None if options.timeout_s is None else loop.time() + options.timeout_s
    compiling = _compiled(engine, turns, requests[0], grammars, options, due_s)
    if grammars.are_needed(options.grammar):
        compiling = run_while_connected(http.receive, compiling)
    grammar, engine = await compiling
    if grammar is not None:
        requests = guide(
            requests,
            grammar.whole,
            model.end_token_ids,
            ensures_complete=options.ensure_complete,
        )
        metrics.observe_loosened(len(grammar.whole.loosened))
    stop = StopAutomaton(options.stop)
    choices, scores = [], []
    for first in range(0, len(requests), options.n):
        sampling = requests[first].sampling
        is_scored = sampling.num_prompt_logprobs is not None
        num_expected = len(requests[first].prompt_ids) - 1 if is_scored else 0
        scores.append(PromptScores(num_expected=num_expected))
        offset = len(echoes[first // options.n].text)
        choices += [
            ChoiceText(
                model,
                options,
                sampling,
                stop,
                prompt=scores[-1],
                offset=offset,
                turn=None if turns is None else turns.parser(request, options),
                max_calls=None if turns is None else turns.tool_use.max_calls,
                tells_limit=turns is not None and turns.tool_use.tells_limit,
                tells_calls=turns is None or not turns.tool_use.is_named,
            )
            for request in requests[first : first + options.n]
        ]
    answer = kind(
        request_id=request_id,
        created=int(time.time()),
        model=model.id,
        prompts=id_lists,
        n=options.n,
        return_token_ids=options.return_token_ids,
    )
    logprobs = LogprobsWriter(spelling=model.tokenizer, as_ids=options.tokens_as_ids)
    generation = Generation(
        engine,
        requests,
        choices,
        num_samples=options.n,
        timeout_s=None if due_s is None else max(due_s - loop.time(), 0.0),
        on_answer=on_answer,
    )
    http.scope[SUMMARY] = generation.summary
    writer = AnswerWriter(
        generation=generation,
        answer=answer,
        choices=choices,
        echoes=echoes,
        options=options,
        logprobs=logprobs,
        told=ToldPrompts(prompts, echoes, scores, options=options, answer=answer, writer=logprobs),
        turns=turns,
    )

    def end() -> None:
        generation.close()
        for choice in choices:
            metrics.observe_turn(choice.num_calls, choice.faults)

    if options.stream:
        return EventStreamResponse(writer.frames(), on_end=end, heartbeat_s=config.heartbeat_s)
    try:
        body = await run_while_connected(http.receive, writer.whole())
    finally:
        end()
    return Response(body, media_type="application/json")


async def _compiled(
    engine: Generator,
    turns: TurnPlan | None,
    request: GenerationRequest,
    grammars: AnswerGrammars,
    options: GenerationOptions,
    due_s: float | None,
) -> tuple[AnswerGrammar | None, Generator]:
    """Return what an answer has to be, and an engine as `_limited` does.

    The wait ends at `due_s` of the loop's clock.
    """
    try:
        async with asyncio.timeout_at(due_s):
            grammar = await grammars.of_answer(options.grammar)
            if turns is not None:
                engine = await _limited(engine, turns, request, grammars, grammar, options)
    except TimeoutError as error:
        raise UnavailableError(
            "timeout_s is over before the answer's grammar is compiled."
        ) from error
    return grammar, engine


async def _limited(
    engine: Generator,
    turns: TurnPlan,
    request: GenerationRequest,
    grammars: AnswerGrammars,
    grammar: AnswerGrammar | None,
    options: GenerationOptions,
) -> Generator:
    """Return an engine that keeps to the budget of thoughts, where there is one."""
    model, markers = turns.model, turns.markers
    if turns.thought_budget is None:
        return engine
    if markers is None:
        raise InvalidRequestError(
            "thinking_token_budget: this model does not think", param="thinking_token_budget"
        )

    def guided(by: Grammar) -> Guidance:
        end_ids, ensures = request.sampling.stop_token_ids, options.ensure_complete
        return guidance(by, end_ids, model.end_token_ids, ensures_complete=ensures)

    forced: dict[tuple[int, ...], Grammar] = {}
    if options.logprobs is not None or options.prompt_logprobs is not None:
        for ids in closers(markers, model.tokenizer):
            forced[ids] = await grammars.behind(grammar, Forced(ids))
    return ThoughtBudget(
        engine=engine,
        num_tokens=turns.thought_budget,
        markers=markers,
        tokenizer=model.tokenizer,
        guidance=None if grammar is None else guided(await grammars.behind(grammar)),
        forced={ids: guided(by) for ids, by in forced.items()},
    )


def session_of(options: GenerationOptions, http: HttpRequest) -> str | None:
    """Return whose prefix is to stay cached: the body's name of it, or else the header's."""
    if options.session is not None or _SESSION_HEADER not in http.headers:
        return options.session
    # A header's bytes come as latin-1; what is no UTF-8 is no name either.
    name = http.headers[_SESSION_HEADER].encode("latin-1").decode(errors="replace")
    return Name()(name, _SESSION_HEADER)
