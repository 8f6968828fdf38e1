"""`jaxserve compile`: what serving a model on a device needs, compiled ahead into a folder."""

import logging
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from jaxserve.config import ServeConfig
from jaxserve.device.choices import LoadOptions
from jaxserve.device.loader import compile_bundle
from jaxserve.device.targets import find_target_by_name
from jaxserve.hub.resolve import check_folder, resolve_model
from jaxserve.progress import Progress

logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130


def run(config: ServeConfig, target_name: str, out: Path, cache_dir: Path) -> int:
    """Compile for one of config.TARGETS; returns the exit code.

    Raises:
        ConfigError: what a setting asks for cannot be had, or the target's compiler is missing.
        ModelLoadError: the checkpoint cannot be served.
    """
    signal.signal(signal.SIGINT, _end_now)
    check_folder(config.model)
    started_s = time.perf_counter()
    target = find_target_by_name(target_name)
    folder = resolve_model(config.model, cache_dir=cache_dir)
    with ExitStack() as bars:
        bar: Progress | None = None

        def progress(phase: str, done: int, total: int) -> None:
            nonlocal bar
            if bar is None or done == 0:
                bars.close()
                bar = bars.enter_context(Progress(phase, total))
            bar.reach(done)

        count, num_bytes = compile_bundle(folder, LoadOptions.of(config), target, out, progress)
    logger.info(
        "%d programs for %s in %s: %.1f MB, in %.1f s",
        count,
        target_name,
        out,
        num_bytes / 1e6,
        time.perf_counter() - started_s,
    )
    return 0


def _end_now(_: int, __: FrameType | None) -> None:
    """End the process: the interpreter would wait for what compiles, for minutes."""
    sys.stderr.write("jaxserve: interrupted\n")
    os._exit(EXIT_INTERRUPTED)
