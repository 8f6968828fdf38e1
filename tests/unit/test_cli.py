"""The command line: flags become settings, failures become exit codes."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import jaxserve
from jaxserve import app, cli
from jaxserve.config import ServeConfig
from jaxserve.errors import ConfigError, ModelLoadError


class FakeServe:
    """Takes the place of `app.serve`."""

    def __init__(self) -> None:
        self.configs: list[ServeConfig] = []
        self.fault: BaseException | None = None

    def __call__(self, config: ServeConfig, cache_dir: Path) -> int:
        self.configs.append(config)
        if self.fault is not None:
            raise self.fault
        return 7


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    fake = FakeServe()
    monkeypatch.setattr("jaxserve.app.serve", fake)
    monkeypatch.setattr("jaxserve.logs.configure", lambda level: None)
    return fake


def test_without_flags_the_settings_are_the_defaults(serve: FakeServe) -> None:
    assert cli.main(["serve"]) == 7
    assert serve.configs == [ServeConfig()]


def test_every_setting_has_a_flag_of_its_type(serve: FakeServe) -> None:
    values = {
        "model": "org/name",
        "served_model_name": "name",
        "host": "::1",
        "port": 9,
        "dtype": "bfloat16",
        "weights": "int4",
        "ple_dtype": "bf16",
        "head_dtype": "int8",
        "kv_dtype": "int8",
        "attention": "xla",
        "max_model_len": 100,
        "max_batch": 3,
        "kv_cache_bytes": 1 << 40,
        "tokens_per_resume_point": 100,
        "grammar_bytes": 1 << 20,
        "no_forced_runs": True,
        "grammar_compile_s": 1.25,
        "grammar_compile_bytes": 1 << 29,
        "warm_schemas": "warm.json",
        "max_waiting_requests": 5,
        "max_waiting_tokens": 6,
        "prefill_stall_factor": 2.5,
        "session_grace_s": 1.5,
        "no_prefix_cache": True,
        "no_turn_memory": True,
        "no_strict_tools": True,
        "drop_from_system": ("^x:.*$", "b"),
        "compile_cache": "",
        "programs": "folder",
        "drain_s": 0.5,
        "heartbeat_s": 0.0,
        "api_key": ("one", "two"),
        "cors_origin": ("https://a.example", "*"),
        "generation_config": "off",
        "trust_request_chat_template": True,
        "reasoning_field": "none",
        "max_body_bytes": 7,
        "log_level": "DEBUG",
    }
    assert set(values) == {field.name for field in fields(ServeConfig)}
    flags = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag)
        else:
            each = value if isinstance(value, tuple) else (value,)
            flags += [f"{flag}={one}" for one in each]

    cli.main(["serve", *flags])

    assert serve.configs == [ServeConfig(**values)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (ConfigError("it does not fit"), 2),
        (ModelLoadError("no such tensor"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_fault_becomes_an_exit_code_and_a_line(
    serve: FakeServe, capsys: pytest.CaptureFixture[str], fault: BaseException, code: int
) -> None:
    serve.fault = fault

    assert cli.main(["serve"]) == code
    assert capsys.readouterr().err == f"jaxserve: {str(fault) or 'interrupted'}\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--max-num-seqs", "8"], "--max-num-seqs: --max-batch"),
        (["org/name", "-c", "4096"], "-c: --max-model-len, of one sequence"),
        (["--kv-cache-dtype=fp8"], "--kv-cache-dtype: --kv-dtype"),
        (["--max-modellen=8"], "--max-modellen: --max-model-len?"),
    ],
)
def test_an_unknown_flag_is_named_with_what_may_have_been_meant(
    serve: FakeServe, capsys: pytest.CaptureFixture[str], arguments: list[str], hint: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["serve", *arguments])

    assert exit_info.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"  {hint}"


@pytest.mark.parametrize("flags", [["--max-batch", "many"], ["--dtype", "int8"], ["--bake"]])
def test_a_wrong_flag_is_a_wrong_command_line(serve: FakeServe, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["serve", *flags])
    assert exit_info.value.code == 2
    assert serve.configs == []


def test_a_value_out_of_range_is_told_before_jax_is_imported() -> None:
    script = "import sys; from jaxserve.cli import main; code = main(); print('jax' in sys.modules)"

    result = subprocess.run(
        [sys.executable, "-c", f"{script}; sys.exit(code)", "serve", "--max-batch", "0"],
        cwd=Path(jaxserve.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.returncode, result.stdout) == (2, "False\n")
    assert result.stderr == "jaxserve: --max-batch 0 is less than the least, 1\n"


def test_compile_takes_the_flags_that_shape_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[ServeConfig, str, Path]] = []

    def run(config: ServeConfig, target: str, out: Path, cache_dir: Path) -> int:
        asked.append((config, target, out))
        return 7

    monkeypatch.setattr("jaxserve.compile_command.run", run)
    monkeypatch.setattr("jaxserve.logs.configure", lambda level: None)
    command = ["compile", "org/name", "--target", "cpu", "--out", "programs"]

    assert cli.main([*command, "--max-batch", "3", "--kv-cache-bytes", "2K"]) == 7
    config = ServeConfig(model="org/name", max_batch=3, kv_cache_bytes=2000)
    assert asked == [(config, "cpu", Path("programs"))]

    assert cli.main([*command, "--max-batch", "0"]) == 2
    with pytest.raises(SystemExit):
        cli.main([*command, "--port", "1"])
    assert len(asked) == 1


def test_a_compilation_that_is_interrupted_ends_at_once(tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
from jaxserve import cli, compile_command

def compile_bundle(*_):
    with ThreadPoolExecutor() as pool:
        compiling = pool.submit(time.sleep, 600)
        os.kill(os.getpid(), signal.SIGINT)
        compiling.result()

compile_command.compile_bundle = compile_bundle
sys.exit(cli.main(sys.argv[1:]))
"""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    flags = ["--target", "cpu", "--out", str(tmp_path / "out"), "--model", str(tmp_path)]

    result = subprocess.run(
        [sys.executable, "-c", script, "compile", *flags],
        cwd=Path(jaxserve.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.returncode, result.stderr) == (130, "jaxserve: interrupted\n")


def test_programs_of_a_folder_that_is_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="--programs /nowhere: there is no such folder"):
        app.serve(ServeConfig(programs="/nowhere", port=0), Path("cache"))


def test_fetch_prints_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("jaxserve.logs.configure", lambda level: None)
    monkeypatch.setattr(cli, "fetch_gemma3_270m", lambda cache_dir: cache_dir / "gemma3-270m")

    assert cli.main(["fetch", "gemma3-270m"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/jaxserve/gemma3-270m\n"


def test_without_xdg_the_cache_is_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    assert cli.cache_dir() == tmp_path / ".cache/jaxserve"


@pytest.mark.parametrize(
    ("flags", "variable", "keys"),
    [
        ([], None, ()),
        ([], "", ()),
        ([], " one, ,two ", ("one", "two")),
        (["--api-key", "a", "--api-key=b"], None, ("a", "b")),
        (["--api-key", "a"], "one", ("a", "one")),
    ],
)
def test_keys_come_from_flags_and_the_environment(
    serve: FakeServe,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    variable: str | None,
    keys: tuple[str, ...],
) -> None:
    monkeypatch.delenv(cli.API_KEY_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(cli.API_KEY_VARIABLE, variable)
    cli.main(["serve", *flags])
    assert serve.configs[0].api_key == keys


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(
    serve: FakeServe, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    assert cli.main(["serve", "--api-key", key]) == 2
    assert "--api-key" in capsys.readouterr().err
    assert serve.configs == []
