"""scripts/bench_engine.py: its statistics on scripted times, and a run of it on a tiny model."""

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest

from scripts import bench_engine
from scripts.bench_engine import (
    Figure,
    Settings,
    Trace,
    decoding_tokens_per_s,
    gaps_s,
    running_engine,
    stream_completion,
    sweep,
    tiny_model,
    tokens_per_s,
    usual_and_largest_gap_s,
)


def trace(submitted_s: float, *tokens_s: float) -> Trace:
    return Trace(submitted_s, list(tokens_s))


def test_rate_runs_from_the_first_submission_to_the_last_token() -> None:
    assert tokens_per_s([trace(1.0, 2.0, 2.5), trace(1.5, 4.0, 5.0)]) == 4 / (5.0 - 1.0)


def test_decoding_rate_counts_while_all_decode() -> None:
    # From 4, the last first token, to 6, the first last token: those at 5, 6 and at 5.
    traces = [trace(1.0, 2.0, 3.0, 5.0, 6.0), trace(1.0, 4.0, 5.0, 7.0)]
    assert decoding_tokens_per_s(traces) == 3 / (6.0 - 4.0)
    assert decoding_tokens_per_s([trace(1.0, 2.0, 3.0), trace(1.0, 4.0, 5.0)]) == 0.0


def test_gaps_lie_between_tokens_of_one_stream() -> None:
    gaps = [(2.0, 2.5), (4.0, 5.0), (5.0, 7.0)]
    assert gaps_s([trace(1.0, 2.0, 2.5), trace(1.5, 4.0, 5.0, 7.0)]) == gaps


def test_first_token_is_timed_from_submission() -> None:
    assert trace(1.0, 1.25, 1.5).ttft_s == 0.25


def test_largest_gap_is_the_one_that_meets_the_interval() -> None:
    # Gaps of 1 before 10; one of 3 that reaches into [10, 14]; one of 8 that begins at its end.
    running = [trace(0.0, 7.0, 8.0, 9.0, 12.0, 14.0, 22.0), trace(0.0, 8.0, 9.0, 10.0, 12.5, 14.0)]
    assert usual_and_largest_gap_s(running, 10.0, 14.0) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure("rate", "tokens/s", [1.0, 9.0, 5.0], at_least=5.0), "≥ 5 met"),
        (Figure("rate", "tokens/s", [1.0, 9.0, 4.0], at_least=5.0), "≥ 5 MISSED"),
        (Figure("gap", "ms", [4.0, 6.0, 9.0], at_most=5.0), "≤ 5 MISSED"),
        (Figure("gap", "ms", [4.0, 5.0, 9.0], at_most=5.0), "≤ 5 met"),
    ],
)
def test_the_median_decides_whether_a_target_is_met(figure: Figure, verdict: str) -> None:
    assert figure.line().endswith(verdict)


async def test_client_counts_the_tokens_of_a_streamed_answer() -> None:
    events = ['{"choices":[{"token_ids":[5,6]}]}', '{"choices":[{"token_ids":[7]}]}']
    events += ['{"choices":[{"finish_reason":"length"}]}', "[DONE]"]
    requests = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        requests.append(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for event in events:
            writer.write(b"2a\r\ndata: " + event.encode() + b"\n\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        timed = trace(time.perf_counter())
        await stream_completion(server.sockets[0].getsockname()[1], (8, 9), 3, timed)
    assert len(timed.tokens_s) == 3
    assert timed.ttft_s > 0
    assert requests[0]["prompt"] == [8, 9]
    assert requests[0]["max_tokens"] == 3
    assert requests[0]["stream"]


async def test_client_raises_what_the_server_refuses() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\nfull")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RuntimeError, match="429 Too Many Requests"):
            await stream_completion(port, (8,), 1, trace(0.0))


@pytest.mark.usefixtures("compile_fast")
async def test_sweep_of_the_engine_on_a_tiny_model() -> None:
    with tiny_model() as folder:
        config = json.loads((folder / "config.json").read_text())
        # The fewer positions, the fewer programs to compile.
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
        settings = Settings(
            repeats=2, streams="1,2", prompt_tokens=4, output_tokens=5, prefill_tokens=8
        )
        with running_engine(folder, "float32", max_batch=2) as (generate, core):
            figures = await sweep(generate, settings)
            assert core.host_times
    assert [figure.name for figure in figures] == [
        "1 stream",
        "1 stream, all decoding",
        "1 stream, first token",
        "1 stream, between tokens",
        "2 streams",
        "2 streams, all decoding",
        "2 streams, first token",
        "2 streams, between tokens",
        "prefill of 8 tokens",
    ]
    assert all(len(figure.samples) == 2 for figure in figures)
    # Two streams need not be decoding at one time: the first may end before the second begins.
    together = ("2 streams, all decoding", "2 streams, between tokens")
    always = [figure for figure in figures if figure.name not in together]
    assert all(sample > 0 for figure in always for sample in figure.samples)


def test_command_saves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(folder: Path, settings: Settings) -> list[Figure]:
        return [Figure(folder.name, "tokens/s", [float(settings.prompt_tokens)])]

    monkeypatch.setitem(bench_engine.MEASUREMENTS, "engine", measure)
    # Both would outlast the test.
    monkeypatch.setattr(bench_engine, "use_compile_cache", lambda folder: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    save = tmp_path / "figures.json"
    flags = ["--model", str(tmp_path), "--prompt-tokens", "7", "--save", str(save)]
    bench_engine.main(["--only", "engine", *flags])
    report = json.loads(save.read_text())
    assert report["engine"][0]["name"] == tmp_path.name
    assert report["engine"][0]["samples"] == [7.0]
    assert report["settings"]["streams"] == "1,2,4,8,16"
    assert report["hardware"]["cores"] >= 1


def test_command_refuses_an_unknown_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_engine.main(["--only", "engine,luck"])
    assert "--only luck is none of" in capsys.readouterr().err
