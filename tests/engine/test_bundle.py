"""A start from programs that were compiled ahead compiles nothing and gives the same tokens."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import jax
import pytest
from jax.stages import Compiled, Lowered

from jaxserve.device import loader
from jaxserve.device.bundle import Bundle
from jaxserve.device.choices import Choices, LoadOptions
from jaxserve.device.loader import LoadedModel, compile_bundle, load_model
from jaxserve.device.memory import PoolSizes
from jaxserve.device.runner import Program, name_of
from jaxserve.device.targets import Target, find_target
from jaxserve.errors import ConfigError
from jaxserve.models.registry import load_config
from tests import oracle
from tests.checkpoints import make_checkpoint, read_tensors
from tests.engine.tiny import CLOSE, Sizes, TinyEngine, prompt_of, request_of

pytestmark = [
    pytest.mark.timeout(300),  # the first test waits for the compiler
    pytest.mark.usefixtures("compile_fast"),
]

OPTIONS = LoadOptions(
    dtype="float32",
    weights="auto",
    ple_dtype="auto",
    kv_dtype="auto",
    max_model_len=64,
    max_batch=1,
    kv_cache_bytes=1 << 20,
    tokens_per_resume_point=64,
)
PROMPT = prompt_of(20)
CACHE_OPTION = "jax_enable_compilation_cache"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bundle") / "model", "dense")


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, compile_fast: None) -> Path:
    folder = checkpoint.parent / "bundle"
    count, _ = compile_bundle(checkpoint, OPTIONS, find_target(), folder, ignore)
    assert count == len(list(folder.glob("*.program"))) == 7
    return folder


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_compiled(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*file cannot be used"):
        compile_bundle(tmp_path / "no model", OPTIONS, find_target(), tmp_path / "file", ignore)


def test_a_compilation_goes_on_where_one_has_ended(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(Exception):
        pass

    kept: list[Program] = ["allocate", "write_table"]
    asked: list[set[Program]] = []

    def compile_some(
        lower: dict[Program, Callable[[], Lowered]],
        progress: object,
        keep: Callable[[Program, Compiled], None],
        max_compiles: int | None,
    ) -> None:
        # A program that comes from the compile cache loses parts when it is serialized.
        assert not getattr(jax.config, CACHE_OPTION)
        asked.append(set(lower))
        for program in kept:
            if program in lower:
                keep(program, lower[program]().compile())
        raise Ended

    monkeypatch.setattr(loader, "compile_all", compile_some)
    for _ in range(2):
        with pytest.raises(Ended):
            compile_bundle(checkpoint, OPTIONS, find_target(), tmp_path, ignore)
    assert len(asked[0]) == 7
    assert asked[1] == asked[0] - set(kept)
    assert getattr(jax.config, CACHE_OPTION)


def ignore(phase: str, done: int, total: int) -> None:
    pass


def kv_addresses(loaded: LoadedModel) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(loaded.runner._cache)]


def assert_greedy(checkpoint: Path, loaded: LoadedModel) -> None:
    """Check some output by the oracle."""
    sizes = Sizes(**{field.name: getattr(loaded.runner, field.name) for field in fields(Sizes)})
    engine = TinyEngine(loaded.runner, sizes)
    engine.run(request_of("a", PROMPT, 8))
    ids = engine.tokens_of("a")
    assert len(ids) == 8
    steps = oracle.logits(read_tensors(checkpoint), load_config(checkpoint), [*PROMPT, *ids[:-1]])[
        len(PROMPT) - 1 :
    ]
    assert all(step.max() - step[i] < CLOSE for step, i in zip(steps, ids, strict=True))


def test_a_start_from_a_bundle_compiles_nothing(
    checkpoint: Path,
    bundle: Path,
    num_compiles: Callable[[], int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    jax.clear_caches()  # of what this process has compiled itself
    before = num_compiles()
    with caplog.at_level(logging.INFO, logger="jaxserve"):
        loaded = load_model(checkpoint, OPTIONS, ignore, bundle)
        addresses = kv_addresses(loaded)
        assert_greedy(checkpoint, loaded)
    assert num_compiles() == before
    assert kv_addresses(loaded) == addresses  # updated in place
    assert "7 programs from the bundle, 0 compiled" in caplog.text
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_only_a_damaged_program_is_compiled(
    checkpoint: Path,
    bundle: Path,
    tmp_path: Path,
    num_compiles: Callable[[], int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    damaged = folder / "write_table.program"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    jax.clear_caches()  # of what this process has compiled itself
    before = num_compiles()
    loaded = load_model(checkpoint, OPTIONS, ignore, folder)
    assert num_compiles() == before + 1
    assert "write_table is damaged; it is compiled anew" in caplog.text
    assert_greedy(checkpoint, loaded)


def test_a_bundle_of_other_flags_is_not_used(
    checkpoint: Path,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Compiling(Exception):
        pass

    def compile_all(lower: dict[Program, object], progress: object) -> None:
        assert {name_of(program) for program in lower} == {
            file.stem for file in bundle.glob("*.program")
        }
        raise Compiling

    monkeypatch.setattr(loader, "compile_all", compile_all)
    with pytest.raises(Compiling):
        load_model(checkpoint, replace(OPTIONS, grammar_bytes=1), ignore, bundle)
    assert "--grammar-bytes is '1', the bundle's is '0'" in caplog.text


def test_a_bundle_whose_pools_do_not_fit_is_not_used(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target(device=find_target().device, memory_bytes=1 << 30)
    choices = Choices.make(checkpoint, OPTIONS, target)
    loaded = choices.open().describe()
    large = PoolSizes(kv_bytes=2 << 30, temp_bytes=0)
    plan, budget, bundle = loader._make_plan(
        choices, loaded, Bundle(folder=tmp_path, sizes=large, digests={}), ignore
    )
    assert bundle is None
    assert budget.kv_bytes == OPTIONS.kv_cache_bytes
    assert (plan, budget) == choices.make_plan(loaded)
    assert "not used, all programs are compiled anew: weights, programs and KV" in caplog.text
