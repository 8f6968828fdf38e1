"""The endpoints."""

import time
from collections.abc import Callable

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxserve import logs
from jaxserve.errors import EngineDeadError, NotFoundError, UnavailableError
from jaxserve.http.answers import AnswerWriter
from jaxserve.http.body import read_json_body
from jaxserve.http.config import HttpConfig
from jaxserve.http.disconnect import run_while_connected
from jaxserve.http.generation import Engine, Generation
from jaxserve.http.prompts import chat_prompt, completion_prompts
from jaxserve.http.sequences import plan_sequences
from jaxserve.http.served_model import ServedModel
from jaxserve.http.sse import EventStreamResponse
from jaxserve.metrics import Metrics
from jaxserve.openai.requests import GenerationOptions, parse_chat_completion, parse_completion
from jaxserve.openai.responses import Answer, ChatAnswer, CompletionAnswer, model_object

_RETRY_AFTER_S = 5
# OpenAI's default; a chat's is what is left of the context.
_COMPLETION_MAX_TOKENS = 16


class Endpoints:
    """Serves requests from one engine; `model` gives None until the model is loaded."""

    def __init__(
        self,
        engine: Engine,
        model: Callable[[], ServedModel | None],
        *,
        config: HttpConfig,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._model = model
        self._config = config
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """List all routes."""
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{id:path}", self.get_model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/live", self.live, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def chat_completions(self, http: HttpRequest) -> Response:
        """Continue a conversation."""
        model = self._ready_model()
        request = parse_chat_completion(await self._body(http))
        _check_model_name(request.options.model, model)
        prompt = await chat_prompt(request.messages, model)
        return await self._generate(http, ChatAnswer, [prompt], request.options, model)

    async def completions(self, http: HttpRequest) -> Response:
        """Continue each of some prompts."""
        model = self._ready_model()
        request = parse_completion(await self._body(http))
        _check_model_name(request.options.model, model)
        prompts = await completion_prompts(
            request.prompts, model, add_special_tokens=request.add_special_tokens
        )
        return await self._generate(http, CompletionAnswer, prompts, request.options, model)

    async def list_models(self, http: HttpRequest) -> Response:
        """List the one model."""
        model = self._loaded_model()
        return _json({"object": "list", "data": [_describe(model)]})

    async def get_model(self, http: HttpRequest) -> Response:
        """Describe the one model."""
        model = self._loaded_model()
        _check_model_name(http.path_params["id"], model)
        return _json(_describe(model))

    async def health(self, http: HttpRequest) -> Response:
        """Tell whether requests are served now."""
        status = self._engine.status
        is_ready = status.phase == "ready" and self._model() is not None
        report = {
            "status": "ok" if is_ready else "unavailable",
            "phase": status.phase,
            "done": status.done,
            "total": status.total,
            "detail": status.detail,
        }
        return _json(report, status=200 if is_ready else 503)

    async def live(self, http: HttpRequest) -> Response:
        """Tell that the process lives."""
        return _json({"status": "ok"})

    async def metrics(self, http: HttpRequest) -> Response:
        """Export the metrics as Prometheus text."""
        return Response(
            self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _body(self, http: HttpRequest) -> bytes:
        return await read_json_body(http, max_bytes=self._config.max_body_bytes)

    async def _generate(
        self,
        http: HttpRequest,
        kind: type[ChatAnswer] | type[CompletionAnswer],
        prompts: list[tuple[int, ...]],
        options: GenerationOptions,
        model: ServedModel,
    ) -> Response:
        is_chat = kind is ChatAnswer
        request_id = logs.request_id.get()
        requests = plan_sequences(
            prompts,
            options,
            model,
            request_id=request_id,
            param="messages" if is_chat else "prompt",
            default_max_tokens=None if is_chat else _COMPLETION_MAX_TOKENS,
            max_sequences=self._config.max_sequences,
        )
        answer: Answer = kind(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            created=int(time.time()),
            model=model.id,
            prompts=prompts,
            n=options.n,
            return_token_ids=options.return_token_ids,
        )
        generation = Generation(self._engine, model, requests, stop=options.stop)
        writer = AnswerWriter(generation=generation, answer=answer, prompts=prompts, n=options.n)
        if options.stream:
            return EventStreamResponse(
                writer.frames(include_usage=options.include_usage),
                on_end=generation.close,
                heartbeat_s=self._config.heartbeat_s,
            )
        try:
            body = await run_while_connected(http.receive, writer.whole())
        finally:
            generation.close()
        return Response(body, media_type="application/json")

    def _ready_model(self) -> ServedModel:
        phase = self._engine.status.phase
        if phase == "dead":
            raise EngineDeadError("The engine has stopped.")
        if phase != "ready":
            raise UnavailableError(f"The server is {phase}.", retry_after_s=_RETRY_AFTER_S)
        return self._loaded_model()

    def _loaded_model(self) -> ServedModel:
        model = self._model()
        if model is None:
            raise UnavailableError("The model is not loaded yet.", retry_after_s=_RETRY_AFTER_S)
        return model


def _check_model_name(name: str | None, model: ServedModel) -> None:
    if name is not None and name != model.id:
        raise NotFoundError(
            f"The model {name!r} is not served here; {model.id!r} is.",
            param="model",
            code="model_not_found",
        )


def _describe(model: ServedModel) -> dict[str, object]:
    return model_object(model.id, created=model.created, max_model_len=model.max_model_len)


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
