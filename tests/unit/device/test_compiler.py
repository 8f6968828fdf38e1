"""Compiling ahead: all programs, with progress, counted, and kept in a folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Lowered

from jaxserve.device.compiler import (
    compile_all,
    max_temp_bytes,
    on_compile,
    use_compile_cache,
    without_compile_cache,
)


def lower_sum_of_squares(size: int) -> Lowered:
    return jax.jit(lambda x_BD: (x_BD @ x_BD.T).sum()).lower(np.ones((size, size), np.float32))


@pytest.fixture
def compile_cache(tmp_path: Path) -> Iterator[Path]:
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_every_program_is_compiled_under_its_key_with_progress() -> None:
    progress: list[tuple[int, int]] = []
    lower: dict[int, Callable[[], Lowered]] = {
        size: lambda size=size: lower_sum_of_squares(size)  # type: ignore[misc]
        for size in (2, 3, 5)
    }

    programs = compile_all(lower, lambda done, total: progress.append((done, total)))

    assert {size: float(program(jnp.ones((size, size)))) for size, program in programs.items()} == {
        2: 8.0,
        3: 27.0,
        5: 125.0,
    }
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_compiled_program_takes_no_other_shapes() -> None:
    programs = compile_all({2: lambda: lower_sum_of_squares(2)}, lambda done, total: None)

    with pytest.raises(TypeError):
        programs[2](jnp.ones((3, 3)))


def test_a_fault_in_one_program_ends_the_whole() -> None:
    def fail() -> Lowered:
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        compile_all({1: lambda: lower_sum_of_squares(2), 2: fail}, lambda done, total: None)


def test_temp_bytes_are_those_of_the_neediest_program() -> None:
    programs = compile_all(
        {size: lambda size=size: lower_sum_of_squares(size) for size in (8, 256)},  # type: ignore[misc]
        lambda done, total: None,
    )

    alone = [max_temp_bytes([program]) for program in programs.values()]
    assert max_temp_bytes(programs.values()) == max(alone) > min(alone)


def test_compilations_are_counted_and_calls_are_not() -> None:
    compiled: list[None] = []
    on_compile(lambda: compiled.append(None))
    x_D = jnp.ones(7)

    triple = jax.jit(lambda x_D: x_D * 3)
    before = len(compiled)
    triple(x_D).block_until_ready()
    assert len(compiled) == before + 1

    triple(x_D).block_until_ready()
    assert len(compiled) == before + 1


def test_compiled_programs_are_kept_in_the_folder(compile_cache: Path) -> None:
    use_compile_cache(compile_cache / "compiled")

    compile_all({11: lambda: lower_sum_of_squares(11)}, lambda done, total: None)
    kept = sorted(path.name for path in (compile_cache / "compiled").iterdir())
    jax.clear_caches()
    compile_all({11: lambda: lower_sum_of_squares(11)}, lambda done, total: None)

    assert any(name.startswith("jit_") for name in kept)
    assert sorted(path.name for path in (compile_cache / "compiled").iterdir()) == kept


def test_what_is_serialized_does_not_come_from_the_compile_cache(compile_cache: Path) -> None:
    def sums(x_BD: jax.Array) -> jax.Array:
        # One of the operations whose functions JAX leaves out of what it read from its cache.
        return jnp.cumsum(jnp.tanh(x_BD @ x_BD), axis=-1)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    use_compile_cache(compile_cache)
    jax.jit(sums).lower(shape).compile()
    cached = {path.name for path in compile_cache.iterdir()}
    assert cached
    jax.clear_caches()

    with without_compile_cache():
        serialized, in_tree, out_tree = serialize(jax.jit(sums).lower(shape).compile())

    assert {path.name for path in compile_cache.iterdir()} == cached
    loaded = deserialize_and_load(
        serialized, in_tree, out_tree, execution_devices=jax.devices()[:1]
    )
    ones_BD = np.ones((64, 64), np.float32)
    np.testing.assert_array_equal(loaded(ones_BD), jax.jit(sums)(ones_BD))
