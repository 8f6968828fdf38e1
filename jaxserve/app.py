"""Wires the parts into a server process and runs it from start to exit.

The event loop listens from the first moment; one thread loads the model and then becomes the device
thread, so that arrays live and die in it.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn, Self

import uvicorn
import uvloop

from jaxserve import STARTED_S
from jaxserve.config import ServeConfig, check_text
from jaxserve.device.buckets import DecodeBucket
from jaxserve.device.choices import LoadOptions
from jaxserve.device.compiler import on_compile, use_compile_cache
from jaxserve.device.loader import LoadedModel, load_model
from jaxserve.engine.client import EngineClient, EngineStatus, Phase
from jaxserve.engine.core import EngineCore
from jaxserve.engine.inbox import Inbox
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import ConfigError
from jaxserve.guided.service import GrammarCompiler
from jaxserve.guided.specs import read_warm_specs
from jaxserve.guided.tables import GrammarSpec
from jaxserve.guided.vocabulary import GrammarVocabulary
from jaxserve.http.answer_parts import REASONING_FIELDS
from jaxserve.http.app import build_app
from jaxserve.http.config import HttpConfig
from jaxserve.http.grammars import Grammars
from jaxserve.http.layouts import Layouts
from jaxserve.http.protocol import HttpProtocol
from jaxserve.http.served_model import ServedModel
from jaxserve.hub.demo import DEMO_MODEL_NAME
from jaxserve.hub.resolve import check_folder, resolve_model
from jaxserve.metrics import Metrics
from jaxserve.models.registry import end_token_ids, sampling_defaults
from jaxserve.progress import Phases, Progress
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.markers import Markers
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import SamplingDefaults

logger = logging.getLogger(__name__)

EXIT_DIED = 1
EXIT_INTERRUPTED = 130

_JOIN_S = 5.0
"""What a device thread gets to leave; one that compiles cannot be told to."""

_ANSWER_S = 1.0
"""What requests that are cut off get for their last words."""

_SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may keep the interpreter from the device thread."""


def serve(config: ServeConfig, cache_dir: Path) -> NoReturn:
    """Serve until told to stop, and end the process.

    Raises:
        ConfigError: what a setting asks for cannot be had.
        ModelLoadError: the checkpoint cannot be served.
    """
    check_folder(config.model)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with _listen(config.host, config.port) as listener:
        server = _Server(config, cache_dir)
        # Never closed: that would wait for worker threads, and one may be in an endless template.
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        runner.run(server.run(listener))
    code = server.finish()
    logger.info("stopped")
    logging.shutdown()
    sys.stdout.flush()
    # The interpreter would wait for every thread, and XLA takes seconds to take itself apart.
    os._exit(code)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error}") from error


class _HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: here a signal drains before anything is shut."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """The process: the event loop's side in `run`, the device thread in `_work`."""

    def __init__(self, config: ServeConfig, cache_dir: Path) -> None:
        self._config = config
        self._cache_dir = cache_dir
        self._inbox = Inbox()
        self._metrics = Metrics()
        self._model: ServedModel | None = None
        self._fault: Exception | None = None
        self._warm_specs = _read_warm_specs(config.warm_schemas)
        self._bundle_folder = _bundle_folder(config.programs)
        self._warming: asyncio.Task[None] | None = None
        self._is_interrupted = False
        self._thread = threading.Thread(target=self._work, name="device", daemon=True)

    async def run(self, listener: socket.socket) -> None:
        """Listen, start the device thread, and serve until a signal or a fault."""
        config = self._config
        self._loop = asyncio.get_running_loop()
        self._client = EngineClient(
            self._inbox,
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
        )
        app = build_app(
            self._client,
            lambda: self._model,
            config=HttpConfig(
                max_body_bytes=config.max_body_bytes,
                dropped_from_system=config.drop_from_system,
                remembers_turns=not (config.no_turn_memory or config.no_prefix_cache),
                strict_tools=not config.no_strict_tools,
                heartbeat_s=config.heartbeat_s,
                trust_request_chat_template=config.trust_request_chat_template,
                reasoning_fields=REASONING_FIELDS[config.reasoning_field],
                api_keys=config.api_key,
                cors_origins=config.cors_origin,
            ),
            metrics=self._metrics,
        )
        self._http = _HttpServer(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=int(_JOIN_S),
            )
        )
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signal_number, self._on_signal, signal_number)
        host, port = listener.getsockname()[:2]
        logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        self._thread.start()
        await self._http.serve(sockets=[listener])
        if self._warming is not None:
            self._warming.cancel()
        if self._model is not None and self._model.grammars is not None:
            await self._model.grammars.close()
        if cut_off := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in cut_off:
                task.cancel()
            await asyncio.wait(cut_off, timeout=_ANSWER_S)

    def finish(self) -> int:
        """Wait for the device thread and return the exit code; re-raise what stopped a start."""
        self._client.stop()
        self._thread.join(_JOIN_S)
        if self._fault is not None:
            if self._client.status.phase == "dead" and self._model is not None:
                return EXIT_DIED
            raise self._fault
        return EXIT_INTERRUPTED if self._is_interrupted else 0

    # The event loop's side

    def _on_signal(self, signal_number: signal.Signals) -> None:
        phase = self._client.status.phase
        if phase == "draining":
            logger.warning("a second signal: ending what runs")
            self._aborting = self._loop.create_task(self._client.drain(0.0))
            # Not after the drain: a device that hangs never ends it.
            self._http.should_exit = True
            return
        if signal_number == signal.SIGINT and phase != "ready":
            self._is_interrupted = True
            logger.warning("interrupted while %s", phase)
        logger.info("draining: running requests get %.0f s", self._config.drain_s)
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        await self._client.drain(self._config.drain_s)
        self._http.should_exit = True

    def _warm_grammars(self, grammars: Grammars) -> None:
        self._warming = self._loop.create_task(grammars.warm(self._warm_specs))

    def _stop_http(self) -> None:
        self._http.should_exit = True

    # The device thread's side

    def _work(self) -> None:
        """Load the model and run the engine; the thread's whole life."""
        try:
            core = self._start()
        except Exception as fault:  # handed to `finish`, which raises it in the main thread
            self._die(fault)
            return
        core.run()

    def _die(self, fault: Exception) -> None:
        self._fault = fault
        self._client.set_status(EngineStatus(phase="dead", detail=str(fault)))
        # After the events that tell the clients, which are queued on the loop already; it is closed
        # where the process has been told to stop before.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop_http)

    def _start(self) -> EngineCore:
        config = self._config
        phases = Phases(STARTED_S)
        phases.end("importing")
        if config.compile_cache != "":
            use_compile_cache(Path(config.compile_cache or self._cache_dir / "compiled"))
        if config.model is None or not Path(config.model).expanduser().is_dir():
            source = config.model or DEMO_MODEL_NAME
            self._client.set_status(EngineStatus(phase="fetching", detail=source))
        folder = resolve_model(config.model, cache_dir=self._cache_dir)
        phases.end("fetching")
        name = self._served_name(folder)
        tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
        end_ids = end_token_ids(folder)
        uses_defaults = config.generation_config == "auto"
        defaults = sampling_defaults(folder) if uses_defaults else SamplingDefaults()
        phases.end("reading the tokenizer")
        with _PhaseReport(self._client) as report:
            options = LoadOptions.of(config)
            loaded = load_model(folder, options, report, self._bundle_folder, phases)
        scheduler = make_scheduler(
            loaded,
            prefill_stall_factor=config.prefill_stall_factor,
            reuses_prefixes=not config.no_prefix_cache,
            session_grace_s=config.session_grace_s,
            forces_runs=not config.no_forced_runs,
        )
        plan = loaded.runner.plan
        self._metrics.set_info(
            attention=plan.attention,
            dtype=plan.dtype,
            head_dtype=loaded.head_dtype,
            kv_dtype=plan.kv_dtype,
        )
        on_compile(self._metrics.serving_compiles.inc)
        grammar_folder = self._cache_dir / "grammars"
        grammars = make_grammars(config, loaded, tokenizer, end_ids, grammar_folder)
        self._model = ServedModel(
            id=name,
            tokenizer=tokenizer,
            chat_template=template,
            vocab_size=loaded.config.vocab_size,
            max_model_len=loaded.runner.max_model_len,
            end_token_ids=end_ids,
            placeholder_token_ids=loaded.config.placeholder_token_ids,
            created=int(time.time()),
            defaults=defaults,
            grammars=grammars,
        )
        core = EngineCore(
            loaded.runner,
            scheduler,
            self._inbox,
            publish=self._client.deliver,
            on_death=self._die,
            metrics=self._metrics,
        )
        self._client.set_status(EngineStatus(phase="ready"))
        with suppress(RuntimeError):  # the loop is closed where the process is to stop already
            self._loop.call_soon_threadsafe(self._warm_grammars, grammars)
        phases.end("starting the engine")
        parts = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases.seconds.items())
        total_s = sum(phases.seconds.values())
        logger.info("ready after %.1f s (%s): %s", total_s, parts, self._model.id)
        return core

    def _served_name(self, folder: Path) -> str:
        config = self._config
        if config.served_model_name is not None:
            return config.served_model_name
        if config.model is None:
            return DEMO_MODEL_NAME
        if Path(config.model).expanduser() != folder:
            return config.model
        name = folder.resolve().name
        check_text("the name of --model's folder, which --served-model-name may replace,", name)
        return name


def make_grammars(
    config: ServeConfig,
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    end_ids: frozenset[int],
    folder: Path,
) -> Grammars:
    """Return the grammars of a loaded model, whose control tokens are no text.

    Their tables are kept in `folder`.
    """
    vocab_size = loaded.config.vocab_size
    markers = Markers.find(tokenizer)
    vocabulary = GrammarVocabulary.build(
        tokenizer.pieces,
        control_ids=tokenizer.special_ids.union(
            end_ids,
            loaded.config.placeholder_token_ids,
            markers.spellings.values() if markers else (),
        ),
        vocab_size=vocab_size,
    )
    return Grammars(
        GrammarCompiler(
            vocabulary,
            cache_dir=folder,
            cpu_s=config.grammar_compile_s,
            memory_bytes=config.grammar_compile_bytes,
        ),
        Layouts(
            vocabulary,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            vocab_size=vocab_size,
            arena_rows=loaded.runner.arena_rows,
        ),
    )


def make_scheduler(
    loaded: LoadedModel,
    *,
    prefill_stall_factor: float,
    reuses_prefixes: bool = True,
    session_grace_s: float = 60.0,
    forces_runs: bool = True,
) -> Scheduler:
    """Return a scheduler for a loaded model, with the warm-up's durations as first estimates."""
    scheduler = Scheduler(
        loaded.runner,
        prefill_stall_factor=prefill_stall_factor,
        reuses_prefixes=reuses_prefixes,
        session_grace_s=session_grace_s,
        forces_runs=forces_runs,
    )
    for program, duration_s in loaded.warm_up_s.items():
        if isinstance(program, DecodeBucket):
            scheduler.times.learn_decode(program.rows, duration_s)
        elif not program.scores:
            scheduler.times.learn_extend(program.bucket, duration_s)
    return scheduler


def _read_warm_specs(path: str | None) -> list[GrammarSpec]:
    if path is None:
        return []
    try:
        return read_warm_specs(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--warm-schemas {path} cannot be read: {error}") from error


def _bundle_folder(path: str | None) -> Path | None:
    folder = None if path is None else Path(path).expanduser()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--programs {path}: there is no such folder")
    return folder


class _PhaseReport:
    """Passes the loader's progress on to /health, and to whoever watches the terminal."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._part: tuple[Phase, int] | None = None
        self._bars = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.close()

    def __call__(self, phase: Phase, done: int, total: int) -> None:
        """Note that `done` steps of a phase's `total` are done."""
        if (phase, total) != self._part:
            self._bars.close()
            self._part = (phase, total)
            self._bar = self._bars.enter_context(Progress(phase, total))
        self._bar.reach(done)
        self._client.set_status(EngineStatus(phase=phase, done=done, total=total))
