"""The command line: reads flags and the environment, runs a command, maps failures to codes.

Exit codes: 0 done, 1 the engine died, 2 a flag, the configuration or a grammar is wrong, 3 the
model cannot be served, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

from jaxserve import __version__, grammar_command, logs
from jaxserve.config import PROGRAM_FLAGS, TARGETS, ServeConfig, serve_flags
from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.flag_hints import unrecognized
from jaxserve.hub.demo import DEMO_MODEL_NAME, fetch_gemma3_270m

API_KEY_VARIABLE = "JAXSERVE_API_KEY"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    command_line = parser()
    known, unknown = command_line.parse_known_args(argv)
    if unknown:
        command_line.error(unrecognized(unknown, [_flag(setting) for setting in serve_flags()]))
    arguments = vars(known)
    command = arguments.pop("command")
    try:
        if command == "fetch":
            logs.configure("INFO")
            sys.stdout.write(f"{fetch_gemma3_270m(cache_dir())}\n")
            return 0
        if command == "grammar":
            logs.configure("INFO")
            return grammar_command.run(arguments, cache_dir())
        if command == "compile":
            return _compile(arguments)
        return _serve(_serve_config(arguments))
    except ConfigError as error:
        return _fail(error, 2)
    except ModelLoadError as error:
        return _fail(error, 3)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def cache_dir() -> Path:
    """Return the folder that fetched models and compiled programs go to."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxserve"


def _serve_config(arguments: dict[str, Any]) -> ServeConfig:
    """Make settings of parsed flags and the environment."""
    _name_model(arguments)
    from_environment = os.environ.get(API_KEY_VARIABLE, "").split(",")
    for setting in serve_flags():
        if isinstance(setting.default, tuple):
            arguments[setting.name] = tuple(arguments[setting.name] or ())
    arguments["api_key"] += tuple(filter(None, map(str.strip, from_environment)))
    return ServeConfig(**arguments)


def _name_model(arguments: dict[str, Any]) -> None:
    """Let MODEL stand for --model."""
    positional = arguments.pop("model_argument")
    if positional is not None:
        if arguments["model"] not in (None, positional):
            raise ConfigError(f"two models are named: {positional} and {arguments['model']}")
        arguments["model"] = positional


def _serve(config: ServeConfig) -> int:
    config.check()
    logs.configure(config.log_level)
    # Imported late: `fetch`, `--help` and wrong flags need no jax.
    from jaxserve.app import serve

    return serve(config, cache_dir())


def _compile(arguments: dict[str, Any]) -> int:
    target, out = arguments.pop("target"), Path(arguments.pop("out")).expanduser()
    _name_model(arguments)
    config = ServeConfig(**arguments)
    config.check()
    logs.configure("INFO")
    from jaxserve import compile_command

    return compile_command.run(config, target, out, cache_dir())


def _fail(error: Exception | str, code: int) -> int:
    sys.stderr.write(f"jaxserve: {error}\n")
    return code


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something; what None means is in the flag's own text."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="jaxserve", description="An OpenAI-compatible inference server in pure JAX."
    )
    top.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve a model",
        formatter_class=_HelpFormatter,
    )
    _add_settings(serve, serve_flags())
    fetch = commands.add_parser("fetch", help="put a demo model into the user's cache folder")
    fetch.add_argument("name", choices=[DEMO_MODEL_NAME])
    grammar_command.add_command(commands)
    compile_parser = commands.add_parser(
        "compile",
        help="compile all that serving a model on a device needs, for `jaxserve serve --programs`",
        formatter_class=_HelpFormatter,
    )
    compile_parser.add_argument(
        "--target", required=True, choices=TARGETS, help="what to compile for; it need not be here"
    )
    compile_parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder to write; programs in it are replaced"
    )
    names = ("model", *PROGRAM_FLAGS)
    _add_settings(compile_parser, [s for s in serve_flags() if s.name in names])
    for command in (serve, compile_parser):
        command.add_argument(
            "model_argument", nargs="?", metavar="MODEL", help="the same as --model"
        )
    return top


def _flag(setting: Field[Any]) -> str:
    return "--" + setting.name.replace("_", "-")


def _add_settings(command: argparse.ArgumentParser, settings: Iterable[Field[Any]]) -> None:
    for setting in settings:
        options = dict(setting.metadata)
        if options.get("action") != "store_true":
            kind = next((t for t in (int, float) if str(t.__name__) in str(setting.type)), str)
            options.setdefault("type", kind)
        command.add_argument(
            _flag(setting),
            # argparse would append to a default.
            default=None if isinstance(setting.default, tuple) else setting.default,
            help=options.pop("help").replace("%", "%%"),
            **options,
        )


if __name__ == "__main__":
    sys.exit(main())
