"""The endpoints."""

from collections.abc import Callable
from functools import partial

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxserve import __version__, logs
from jaxserve.errors import EngineDeadError, NotFoundError, UnavailableError
from jaxserve.http.answer_parts import TurnPlan
from jaxserve.http.aside import run_aside
from jaxserve.http.auth import OPEN_PATHS
from jaxserve.http.body import read_json_body
from jaxserve.http.chats import Chats
from jaxserve.http.choice import ChoiceText
from jaxserve.http.config import HttpConfig
from jaxserve.http.disconnect import run_while_connected
from jaxserve.http.explain import explain
from jaxserve.http.generate import generate
from jaxserve.http.generation import Engine
from jaxserve.http.grammar_check import check_grammar
from jaxserve.http.middleware import header_request_id
from jaxserve.http.prompts import (
    Echo,
    EncodedPrompt,
    chat_echo,
    check_vocabulary,
    completion_echo,
    completion_prompts,
    decode,
    encode,
)
from jaxserve.http.sequences import prompt_limit
from jaxserve.http.served_model import ServedModel
from jaxserve.metrics import Metrics
from jaxserve.openai.pages import openapi_document
from jaxserve.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    parse_chat_completion,
    parse_completion,
    parse_detokenize,
    parse_explain,
    parse_flush,
    parse_grammar_check,
    parse_release,
    parse_tokenize,
)
from jaxserve.openai.responses import ChatAnswer, CompletionAnswer, model_object
from jaxserve.types import GenerationRequest


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
        self._chats = Chats(config)

    def routes(self) -> list[Route]:
        """List all routes."""
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions/render", self.render, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/cache/explain", self.explain_cache, methods=["POST"]),
            Route("/v1/cache/release", self.release_cache, methods=["POST"]),
            Route("/v1/cache/flush", self.flush_cache, methods=["POST"]),
            Route("/v1/grammar/check", self.check_grammar, methods=["POST"]),
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{id:path}", self.get_model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/live", self.live, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def chat_completions(self, http: HttpRequest) -> Response:
        """Continue a conversation."""
        model = self._ready_model()
        request = parse_chat_completion(await self._body(http))
        _accept(request.options.model, request.options.request_id, http, model)
        return await generate(
            http,
            self._engine,
            model,
            self._config,
            kind=ChatAnswer,
            prompts=[await self._chats.prompt(request, model, must_fit=True)],
            echoes=[chat_echo(request.conversation) if request.options.echo else Echo()],
            options=request.options,
            metrics=self._metrics,
            turns=TurnPlan(
                model=model,
                tool_use=request.tool_use,
                reasoning_fields=self._config.reasoning_fields if request.tells_reasoning else (),
                thinks=request.conversation.is_thinking,
                thought_budget=request.thought_budget,
                strict_by_default=self._config.strict_tools,
            ),
            on_answer=partial(self._note_answer, request, model),
        )

    def _note_answer(
        self,
        request: ChatCompletionRequest,
        model: ServedModel,
        sequence: GenerationRequest,
        choice: ChoiceText,
    ) -> None:
        """Prepare for the request that is to come: the same conversation, and more."""
        self._chats.remember(request, model, sequence, choice)
        if choice.num_calls:
            # Whoever asked is away, running the tools, and comes back with what they gave.
            ids = (*sequence.prompt_ids, *choice.token_ids)
            self._engine.keep(sequence.cache_salt, ids)

    async def completions(self, http: HttpRequest) -> Response:
        """Continue each of some prompts."""
        model = self._ready_model()
        request = parse_completion(await self._body(http))
        options = request.options
        _accept(options.model, options.request_id, http, model)
        prompts = await self._completion_prompts(request, model)
        return await generate(
            http,
            self._engine,
            model,
            self._config,
            kind=CompletionAnswer,
            prompts=prompts,
            echoes=[
                await completion_echo(
                    prompt, model, skip_special_tokens=options.skip_special_tokens
                )
                if options.echo
                else Echo()
                for prompt in prompts
            ],
            options=options,
            metrics=self._metrics,
        )

    async def render(self, http: HttpRequest) -> Response:
        """Tell the prompt that a chat completion request would become."""
        model = self._loaded_model()
        request = parse_chat_completion(await self._body(http))
        _accept(request.options.model, request.options.request_id, http, model)
        prompt = await self._chats.prompt(request, model)
        text = prompt.text
        if text is None:  # it was cut
            text = await decode(prompt.token_ids, model, skip_special_tokens=False)
        answer = {"prompt": text, "token_ids": prompt.token_ids}
        return await run_aside(lambda: _json(answer), len(prompt.token_ids))

    async def tokenize(self, http: HttpRequest) -> Response:
        """Tell the ids of a text, or of a conversation."""
        model = self._loaded_model()
        request = parse_tokenize(await self._body(http))
        _accept(request.model, None, http, model)
        if isinstance(request.source, str):
            ids = await encode(
                request.source,
                model,
                add_special_tokens=request.add_special_tokens,
                param="prompt",
            )
        else:
            ids = (await self._chats.render(request.source, model)).token_ids

        def write() -> Response:
            spellings = None
            if request.return_token_strs:
                spellings = [model.tokenizer.id_to_token(token_id) for token_id in ids]
            return _json(
                {
                    "count": len(ids),
                    "max_model_len": model.max_model_len,
                    "tokens": ids,
                    "token_strs": spellings,
                }
            )

        return await run_aside(write, len(ids))

    async def detokenize(self, http: HttpRequest) -> Response:
        """Tell the text of some ids, control tokens included."""
        model = self._loaded_model()
        request = parse_detokenize(await self._body(http))
        _accept(request.model, None, http, model)
        check_vocabulary(request.tokens, model, param="tokens")
        return _json({"prompt": await decode(request.tokens, model, skip_special_tokens=False)})

    async def explain_cache(self, http: HttpRequest) -> Response:
        """Tell what is cached of a prompt, and where it first differs from that."""
        model = self._ready_model()
        request = parse_explain(await self._body(http))
        options = request.options
        _accept(options.model, options.request_id, http, model)
        if isinstance(request, ChatCompletionRequest):
            prompt = await self._chats.prompt(request, model, must_fit=True)
        else:
            [prompt] = await self._completion_prompts(request, model)
        return _json(await explain(prompt.token_ids, options.cache_salt, self._engine, model))

    async def release_cache(self, http: HttpRequest) -> Response:
        """Drop what only one session has in the cache."""
        session = parse_release(await self._body(http))
        return _json({"pages": await self._engine.release_session(session)})

    async def flush_cache(self, http: HttpRequest) -> Response:
        """Drop every cached prefix that no request uses."""
        parse_flush(await self._body(http, may_be_empty=True))
        self._chats.forget()
        return _json({"pages": await self._engine.flush_cache()})

    async def check_grammar(self, http: HttpRequest) -> Response:
        """Tell what a grammar compiles to, and what it says of texts."""
        model = self._loaded_model()
        request = parse_grammar_check(await self._body(http))
        _accept(request.model, None, http, model)
        strict = self._config.strict_tools
        checking = check_grammar(request, model, strict_by_default=strict)
        return _json(await run_while_connected(http.receive, checking))

    async def list_models(self, http: HttpRequest) -> Response:
        """List the one model."""
        model = self._loaded_model()
        return _json({"object": "list", "data": [_describe(model)]})

    async def get_model(self, http: HttpRequest) -> Response:
        """Describe the one model; without a name, list it."""
        if not http.path_params["id"]:
            return await self.list_models(http)
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

    async def version(self, http: HttpRequest) -> Response:
        """Tell the server's version."""
        return _json({"version": __version__})

    async def openapi(self, http: HttpRequest) -> Response:
        """Describe the API as OpenAPI does."""
        open_paths = OPEN_PATHS if self._config.api_keys else None
        return _json(openapi_document(__version__, open_paths=open_paths))

    async def _completion_prompts(
        self, request: CompletionRequest, model: ServedModel
    ) -> list[EncodedPrompt]:
        return await completion_prompts(
            request.prompts,
            model,
            add_special_tokens=request.add_special_tokens,
            keep=prompt_limit(request.options, model, CompletionAnswer),
        )

    async def _body(self, http: HttpRequest, *, may_be_empty: bool = False) -> bytes:
        max_bytes = self._config.max_body_bytes
        return await read_json_body(http, max_bytes=max_bytes, may_be_empty=may_be_empty)

    def _ready_model(self) -> ServedModel:
        phase = self._engine.status.phase
        if phase == "dead":
            raise EngineDeadError("The engine has stopped.")
        if phase != "ready":
            raise UnavailableError(f"The server is {phase}.")
        return self._loaded_model()

    def _loaded_model(self) -> ServedModel:
        model = self._model()
        if model is None:
            raise UnavailableError("The model is not loaded yet.")
        return model


def _accept(
    name: str | None, request_id: str | None, http: HttpRequest, model: ServedModel
) -> None:
    """Take the body's request id where no header gives one, and check the model's name."""
    if request_id is not None and header_request_id(http.scope) is None:
        logs.request_id.set(request_id)
    _check_model_name(name, model)


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
