"""Compiles step programs ahead of serving, side by side, and counts what is compiled afterwards.

A compiled program takes arrays of its own shapes and no others, so serving cannot trace or compile
by accident; the listener is there to prove it.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled, Lowered

from jaxserve.errors import ConfigError

Key = TypeVar("Key", bound=Hashable)

_CACHE_OPTION = "jax_enable_compilation_cache"
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def use_compile_cache(folder: Path) -> None:
    """Keep every compiled program in a folder, so that a second start need not compile it.

    Raises:
        ConfigError: nothing can be written there, which JAX would only warn of.
    """
    make_writable(folder, "--compile-cache")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextmanager
def without_compile_cache() -> Iterator[None]:
    """Compile what is to be serialized here: a CPU's programs lose parts of theirs otherwise.

    JAX serializes one that was read from its cache without functions that it calls, and running it
    fails ("Function … not found").
    """
    was_enabled: bool = getattr(jax.config, _CACHE_OPTION)
    _enable_compile_cache(False)
    try:
        yield
    finally:
        _enable_compile_cache(was_enabled)


def _enable_compile_cache(is_enabled: bool) -> None:
    jax.config.update(_CACHE_OPTION, is_enabled)
    compilation_cache.reset_cache()  # it asks once


def make_writable(folder: Path, flag: str) -> None:
    """Make a folder, or try whether it can be written to, before minutes are spent for it.

    Raises:
        ConfigError: it cannot; names the flag.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be used: {error}") from error


def compile_all(
    lower: Mapping[Key, Callable[[], Lowered]],
    progress: Callable[[int, int], None],
    keep: Callable[[Key, Compiled], None] = lambda key, program: None,
    max_compiles: int | None = None,
) -> dict[Key, Compiled]:
    """Lower and compile every program, on all cores or so many side by side.

    `progress` gets (done, total), and `keep` each program as soon as it is compiled.
    """
    programs: dict[Key, Compiled] = {}
    if not lower:
        return programs
    progress(0, len(lower))
    num_threads = max_compiles or os.cpu_count()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool:
        futures = {pool.submit(_compile, make): key for key, make in lower.items()}
        try:
            for future in as_completed(futures):
                programs[futures[future]] = future.result()
                keep(futures[future], future.result())
                progress(len(programs), len(lower))
        except BaseException:  # raised again, without waiting for what has not begun
            pool.shutdown(cancel_futures=True)
            raise
    return programs


def _compile(lower: Callable[[], Lowered]) -> Compiled:
    return lower().compile()


def max_temp_bytes(programs: Iterable[Compiled]) -> int:
    """Return the most bytes that one of them needs beside its arguments and results."""
    analyses = (program.memory_analysis() for program in programs)
    return max((int(a.temp_size_in_bytes) for a in analyses if a is not None), default=0)


def on_compile(callback: Callable[[], None]) -> None:
    """Call back whenever this process compiles a program from now on, in the compiling thread."""

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            callback()

    jax.monitoring.register_event_duration_secs_listener(listen)
