"""The compile service, with its real process and a small vocabulary."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import ConfigError, OverloadedError, SchemaError, UnavailableError
from jaxserve.guided import process, service
from jaxserve.guided.compiling import compile_grammar
from jaxserve.guided.service import GrammarCompiler
from jaxserve.guided.specs import read_warm_specs
from jaxserve.guided.store import GrammarStore
from jaxserve.guided.tables import GrammarSpec, HostGrammar, TokenTables
from jaxserve.openai.requests import parse_completion
from tests.grammars import tiny_vocabulary

VOCABULARY = tiny_vocabulary()
SMALL = GrammarSpec(kind="json_schema", source='{"type": "boolean"}')
ENDLESS = GrammarSpec(kind="regex", source="(?:[a-d]{1,40}){1,40}(?:.{1,30}x){1,40}")


SPECS = [GrammarSpec(kind="regex", source=source) for source in "abc"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only CPU time end a job: on a busy machine a process may wait for long."""
    monkeypatch.setattr(process, "WALL_FACTOR", 1_000_000)


@pytest.fixture
async def compiler(tmp_path: Path) -> AsyncIterator[GrammarCompiler]:
    async with GrammarCompiler(VOCABULARY, cache_dir=tmp_path, cpu_s=0.5) as made:
        yield made


def kept(folder: Path) -> list[Path]:
    return list(folder.glob("*.grammar"))


async def test_requests_for_one_grammar_share_one_compilation(
    compiler: GrammarCompiler, tmp_path: Path
) -> None:
    first, second = await asyncio.gather(compiler.compile(SMALL), compiler.compile(SMALL))

    assert first is second
    assert await compiler.compile(SMALL) is first
    assert len(kept(tmp_path)) == 1


async def test_one_who_leaves_does_not_end_what_others_wait_for(
    compiler: GrammarCompiler,
) -> None:
    leaving = asyncio.create_task(compiler.compile(SMALL))
    staying = asyncio.create_task(compiler.compile(SMALL))
    await asyncio.sleep(0)
    leaving.cancel()

    assert isinstance(await staying, TokenTables)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.005)


async def test_a_full_queue_takes_no_further_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_QUEUED", 2)
    async with GrammarCompiler(VOCABULARY, cpu_s=3.0) as compiler:
        async with compiler._turn:  # nothing is done meanwhile
            asked = (SPECS[0], *SPECS[:2])
            waiting = [asyncio.create_task(compiler.compile(spec)) for spec in asked]
            await until(lambda: compiler._num_queued == 2)
            with pytest.raises(OverloadedError) as full:
                await compiler.compile(SPECS[2])
            # Nobody knows yet what one takes: all that it may.
            assert full.value.retry_after_s == 6

        await asyncio.gather(*waiting)
        assert isinstance(await compiler.compile(SPECS[2]), TokenTables)


async def test_grammars_that_all_have_left_keep_no_place_in_the_queue(
    compiler: GrammarCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_QUEUED", 2)
    async with compiler._turn:
        asked = (SPECS[0], *SPECS[:2])
        leaving = [asyncio.create_task(compiler.compile(spec)) for spec in asked]
        await until(lambda: compiler._num_queued == 2)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        staying = [asyncio.create_task(compiler.compile(spec)) for spec in SPECS[1:]]
        await until(lambda: compiler._num_queued == 2)

    for task in staying:
        assert isinstance(await task, TokenTables)
    assert len(kept(tmp_path)) == 2


async def test_a_compilation_that_has_begun_is_for_whoever_comes_next(
    compiler: GrammarCompiler,
) -> None:
    leaving = asyncio.create_task(compiler.compile(SMALL))
    await until(lambda: any(search.has_begun for search in compiler._under_way.values()))
    (search,) = compiler._under_way.values()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)

    assert await compiler.compile(SMALL) is await search.task


async def test_grammars_on_disk_come_however_full_the_queue(
    compiler: GrammarCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await compiler.compile(SMALL)
    monkeypatch.setattr(service, "MAX_QUEUED", 0)
    async with GrammarCompiler(VOCABULARY, cache_dir=tmp_path) as second:
        assert isinstance(await second.compile(SMALL), TokenTables)


async def test_a_machine_too_busy_is_no_schemas_fault(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(process, "WALL_FACTOR", 0)
        with pytest.raises(UnavailableError):
            await compiler.compile(SMALL)

    assert isinstance(await compiler.compile(SMALL), TokenTables)


async def test_errors_come_from_the_process_and_are_remembered(
    compiler: GrammarCompiler,
) -> None:
    spec = GrammarSpec(kind="json_schema", source='{"properties": {"a": {"type": "banana"}}}')
    for _ in range(2):
        with pytest.raises(SchemaError) as refused:
            await compiler.compile(spec)
        assert (refused.value.path, refused.value.keyword) == ("/properties/a", "type")


async def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_compiled(
    compiler: GrammarCompiler,
) -> None:
    for _ in range(2):
        with pytest.raises(SchemaError) as refused:
            await compiler.compile(ENDLESS)
        assert refused.value.code == "schema_too_complex"

    assert isinstance(await compiler.compile(SMALL), TokenTables)


async def test_a_process_that_is_killed_is_no_schemas_fault(compiler: GrammarCompiler) -> None:
    await compiler.compile(SMALL)
    kill(compiler)
    assert isinstance(await compiler.compile(GrammarSpec(kind="regex", source="a")), TokenTables)

    seen: set[int] = set()
    compiling = asyncio.create_task(compiler.compile(ENDLESS))
    for _ in range(2):  # the second one is killed as well
        os.kill(await next_process(compiler, seen), signal.SIGKILL)
    with pytest.raises(UnavailableError):
        await compiling
    # Not remembered: now it is the schema's own fault.
    with pytest.raises(SchemaError):
        await compiler.compile(ENDLESS)


def process_of(compiler: GrammarCompiler) -> int | None:
    process = compiler._worker._process
    return None if process is None else process._popen.pid


def kill(compiler: GrammarCompiler) -> None:
    pid = process_of(compiler)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def next_process(compiler: GrammarCompiler, seen: set[int]) -> int:
    """Wait for a process that was not there before."""
    await until(lambda: process_of(compiler) not in {None, *seen})
    pid = process_of(compiler)
    assert pid is not None
    seen.add(pid)
    return pid


async def test_a_broken_file_is_as_good_as_none(tmp_path: Path) -> None:
    async with GrammarCompiler(VOCABULARY, cache_dir=tmp_path) as first:
        made = await first.compile(SMALL)
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    record = whole.index(b"PK\x01\x02")
    odd_method = whole[: record + 10] + b"\x63" + whole[record + 11 :]
    half, changed = whole[: len(whole) // 2], whole[:300] + b"x" * 40 + whole[340:]
    for damaged in (b"", half, changed, odd_method):
        path.write_bytes(damaged)
        async with GrammarCompiler(VOCABULARY, cache_dir=tmp_path) as second:
            again = await second.compile(SMALL)

        assert isinstance(made, TokenTables)
        assert isinstance(again, TokenTables)
        assert (made.next_SC == again.next_SC).all()


def test_kept_grammars_come_back_as_they_were(tmp_path: Path) -> None:
    store = GrammarStore(tmp_path / "new")
    host = HostGrammar(text='start: "é"', reason="a reason")
    store.write("host", host)

    assert store.read("host") == host
    assert store.read("other") is None


def test_arrays_that_do_not_belong_together_are_a_miss(tmp_path: Path) -> None:
    tables = compile_grammar(SMALL, VOCABULARY)
    assert isinstance(tables, TokenTables)
    arrays = {name: getattr(tables, name) for name in TokenTables.__dataclass_fields__}
    with (tmp_path / "odd.grammar").open("wb") as file:
        np.savez(file, **arrays | {"mask_id_S": tables.mask_id_S + 100})

    assert GrammarStore(tmp_path).read("odd") is None


async def test_warming_goes_on_behind_a_grammar_that_is_refused() -> None:
    specs = read_warm_specs('[{"regex": "("}, {"json": {"type": "null"}}, {"choice": ["a"]}]')
    async with GrammarCompiler(VOCABULARY) as compiler:
        await compiler.warm(specs)

        assert isinstance(await compiler.compile(specs[1]), TokenTables)
        assert isinstance(await compiler.compile(GrammarSpec(kind="json_object")), TokenTables)


async def test_warming_a_server_with_a_full_queue_ends(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(service, "MAX_QUEUED", 0)
        await compiler.warm([SMALL])

    await compiler.warm([SMALL])
    assert isinstance(await compiler.compile(SMALL), TokenTables)


def test_what_is_warmed_is_what_a_request_asks_for() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["é", 1.50]}}}
    warmed = read_warm_specs(json.dumps([{"json": schema}, {"choice": ["a", "é"]}]))
    asked = []
    for field, value in (("guided_json", schema), ("guided_choice", ["a", "é"])):
        body = json.dumps({"prompt": "", field: value}).encode()
        grammar = parse_completion(body).options.grammar
        assert grammar is not None
        asked.append(grammar.spec)
    assert [spec.digest for spec in warmed] == [spec.digest for spec in asked]


async def test_a_folder_that_cannot_be_written_to_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"  # no folder can be made there, not even by root
    async with GrammarCompiler(VOCABULARY, cache_dir=folder) as compiler:
        assert isinstance(await compiler.compile(SMALL), TokenTables)


@pytest.mark.parametrize("text", ["{", "{}", "[3]", '[{"lark": "x"}]'])
def test_a_file_that_cannot_be_warmed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_warm_specs(text)
