"""From a parsed request with its prompts to the response: sequences out, an answer back."""

import time
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxserve import logs
from jaxserve.errors import InvalidRequestError
from jaxserve.http.answer_parts import TurnPlan
from jaxserve.http.answers import AnswerWriter
from jaxserve.http.choice import ChoiceText
from jaxserve.http.config import HttpConfig
from jaxserve.http.disconnect import run_while_connected
from jaxserve.http.generation import Engine, Generation
from jaxserve.http.prompts import Echo, EncodedPrompt
from jaxserve.http.sequences import COMPLETION_MAX_TOKENS, plan_sequences
from jaxserve.http.served_model import ServedModel
from jaxserve.http.sse import EventStreamResponse
from jaxserve.http.thought_budget import ThoughtBudget
from jaxserve.metrics import Metrics
from jaxserve.openai.logprobs import LogprobsWriter
from jaxserve.openai.options import GenerationOptions
from jaxserve.openai.responses import Answer, ChatAnswer, CompletionAnswer
from jaxserve.text.stop_strings import StopAutomaton


async def generate(
    http: HttpRequest,
    engine: Engine,
    model: ServedModel,
    config: HttpConfig,
    *,
    kind: type[ChatAnswer] | type[CompletionAnswer],
    prompts: Sequence[EncodedPrompt],
    echoes: Sequence[Echo],
    options: GenerationOptions,
    metrics: Metrics,
    turns: TurnPlan | None = None,
) -> Response:
    """Generate `n` answers to each prompt; a stream is sent when the response is."""
    is_chat = kind is ChatAnswer
    request_id = logs.request_id.get()
    id_lists = [prompt.token_ids for prompt in prompts]
    requests = plan_sequences(
        id_lists,
        options,
        model,
        request_id=request_id,
        param="messages" if is_chat else "prompt",
        default_max_tokens=None if is_chat else COMPLETION_MAX_TOKENS,
        tells_echo=options.echo and not is_chat,
        session=options.session or http.headers.get("x-session-id"),
        max_sequences=config.max_sequences,
    )
    if turns is not None:
        engine = _limited(engine, turns)
        requests = [turns.fit(request) for request in requests]
    stop = StopAutomaton(options.stop)
    choices = [
        ChoiceText(
            model,
            options,
            request.sampling,
            stop,
            offset=len(echoes[i // options.n].text),
            turn=None if turns is None else turns.parser(request, options),
            max_calls=None if turns is None else turns.tool_use.max_calls,
            tells_limit=turns is not None and turns.tool_use.tells_limit,
        )
        for i, request in enumerate(requests)
    ]
    answer: Answer = kind(
        id=f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
        created=int(time.time()),
        model=model.id,
        prompts=id_lists,
        n=options.n,
        return_token_ids=options.return_token_ids,
    )
    generation = Generation(engine, requests, choices, timeout_s=options.timeout_s)
    writer = AnswerWriter(
        generation=generation,
        answer=answer,
        prompts=prompts,
        choices=choices,
        echoes=echoes,
        options=options,
        logprobs=LogprobsWriter(spelling=model.tokenizer, as_ids=options.tokens_as_ids),
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


def _limited(engine: Engine, turns: TurnPlan) -> Engine:
    """Return an engine that keeps to the budget of thoughts, where there is one."""
    if turns.thought_budget is None:
        return engine
    if turns.markers is None:
        raise InvalidRequestError(
            "thinking_token_budget: this model does not think", param="thinking_token_budget"
        )
    return ThoughtBudget(
        engine=engine,
        num_tokens=turns.thought_budget,
        markers=turns.markers,
        tokenizer=turns.model.tokenizer,
    )
