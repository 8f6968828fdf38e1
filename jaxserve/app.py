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
from typing import Self

import uvicorn
import uvloop

from jaxserve.config import ServeConfig
from jaxserve.device.buckets import DecodeBucket
from jaxserve.device.compiler import on_compile, use_compile_cache
from jaxserve.device.loader import LoadedModel, LoadOptions, load_model
from jaxserve.engine.client import EngineClient, EngineStatus, Phase
from jaxserve.engine.core import EngineCore
from jaxserve.engine.inbox import Inbox
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import ConfigError
from jaxserve.http.app import build_app
from jaxserve.http.config import HttpConfig
from jaxserve.http.protocol import HttpProtocol
from jaxserve.http.served_model import ServedModel
from jaxserve.hub.demo import DEMO_MODEL_NAME
from jaxserve.hub.resolve import resolve_model
from jaxserve.metrics import Metrics
from jaxserve.models.registry import end_token_ids, sampling_defaults
from jaxserve.progress import Progress
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types import SamplingDefaults

logger = logging.getLogger(__name__)

EXIT_DIED = 1

_JOIN_S = 5.0
"""What a device thread gets to leave; one that compiles cannot be told to."""

_SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may keep the interpreter from the device thread."""


def serve(config: ServeConfig, cache_dir: Path) -> int:
    """Serve until told to stop; returns the exit code.

    Raises:
        ConfigError: what a setting asks for cannot be had.
        ModelLoadError: the checkpoint cannot be served.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with _listen(config.host, config.port) as listener:
        server = _Server(config, cache_dir)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.run(listener))
    return server.finish()


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
                heartbeat_s=config.heartbeat_s,
                trust_request_chat_template=config.trust_request_chat_template,
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
            self._loop.add_signal_handler(signal_number, self._on_signal)
        host, port = listener.getsockname()[:2]
        logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        self._thread.start()
        await self._http.serve(sockets=[listener])

    def finish(self) -> int:
        """Wait for the device thread and return the exit code; re-raise what stopped a start."""
        self._client.stop()
        self._thread.join(_JOIN_S)
        if self._fault is not None:
            if self._client.status.phase == "dead" and self._model is not None:
                return EXIT_DIED
            raise self._fault
        if self._thread.is_alive():
            # It is inside the compiler, and the interpreter would wait for that at its exit.
            logging.shutdown()
            os._exit(0)
        return 0

    # The event loop's side

    def _on_signal(self) -> None:
        if self._client.status.phase == "draining":
            logger.warning("a second signal: ending what runs")
            self._aborting = self._loop.create_task(self._client.drain(0.0))
            # Not after the drain: a device that hangs never ends it.
            self._http.should_exit = True
            return
        logger.info("draining: running requests get %.0f s", self._config.drain_s)
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        await self._client.drain(self._config.drain_s)
        self._http.should_exit = True

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
        started_s = time.perf_counter()
        if config.compile_cache != "":
            use_compile_cache(Path(config.compile_cache or self._cache_dir / "compiled"))
        folder = resolve_model(config.model, cache_dir=self._cache_dir)
        tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
        end_ids = end_token_ids(folder)
        uses_defaults = config.generation_config == "auto"
        defaults = sampling_defaults(folder) if uses_defaults else SamplingDefaults()
        options = LoadOptions(
            dtype=config.dtype,
            weights=config.weights,
            ple_dtype=config.ple_dtype,
            max_model_len=config.max_model_len,
            max_batch=config.max_batch,
            kv_cache_bytes=config.kv_cache_bytes,
        )
        with _PhaseReport(self._client) as report:
            loaded = load_model(folder, options, report)
        scheduler = make_scheduler(
            loaded,
            prefill_stall_factor=config.prefill_stall_factor,
            reuses_prefixes=not config.no_prefix_cache,
            session_grace_s=config.session_grace_s,
        )
        on_compile(self._metrics.serving_compiles.inc)
        self._model = ServedModel(
            id=self._served_name(folder),
            tokenizer=tokenizer,
            chat_template=template,
            vocab_size=loaded.config.vocab_size,
            max_model_len=loaded.runner.max_model_len,
            end_token_ids=end_ids,
            placeholder_token_ids=loaded.config.placeholder_token_ids,
            created=int(time.time()),
            defaults=defaults,
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
        logger.info("ready after %.1f s: %s", time.perf_counter() - started_s, self._model.id)
        return core

    def _served_name(self, folder: Path) -> str:
        config = self._config
        if config.served_model_name is not None:
            return config.served_model_name
        if config.model is None:
            return DEMO_MODEL_NAME
        is_folder = Path(config.model).expanduser() == folder
        return folder.resolve().name if is_folder else config.model


def make_scheduler(
    loaded: LoadedModel,
    *,
    prefill_stall_factor: float,
    reuses_prefixes: bool = True,
    session_grace_s: float = 60.0,
) -> Scheduler:
    """Return a scheduler for a loaded model, with the warm-up's durations as first estimates."""
    scheduler = Scheduler(
        loaded.runner,
        prefill_stall_factor=prefill_stall_factor,
        reuses_prefixes=reuses_prefixes,
        session_grace_s=session_grace_s,
    )
    for program, duration_s in loaded.warm_up_s.items():
        if isinstance(program, DecodeBucket):
            scheduler.times.learn_decode(program.rows, duration_s)
        elif not program.scores:
            scheduler.times.learn_extend(program.bucket, duration_s)
    return scheduler


class _PhaseReport:
    """Passes the loader's progress on to /health, and to whoever watches the terminal."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._phase: Phase | None = None
        self._bars = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.close()

    def __call__(self, phase: Phase, done: int, total: int) -> None:
        """Note that `done` steps of a phase's `total` are done."""
        if phase != self._phase:
            self._bars.close()
            self._phase, self._bar = phase, self._bars.enter_context(Progress(phase, total))
        self._bar.reach(done)
        self._client.set_status(EngineStatus(phase=phase, done=done, total=total))
