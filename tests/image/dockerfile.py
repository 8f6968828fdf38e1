"""A Dockerfile as stages of instructions, with arguments and environment put in.

Knows the forms that this project's file uses, and refuses others: no escape directive, no ADD, no
shell form of ENTRYPOINT or CMD, no inheritance between stages.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A shell command: as whom, where and with which environment."""

    command: str
    cwd: str
    user: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Files of the context, or of another stage, to a path, which is a folder if it ends in /."""

    sources: tuple[str, ...]
    target: str
    stage: str | None


@dataclass(slots=True, kw_only=True)
class Stage:
    """One FROM and what follows: steps in order, and how the result is run."""

    base: str
    name: str | None
    steps: list[Run | Copy] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = "0:0"
    volumes: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)
    stop_signal: str | None = None
    health_flags: dict[str, str] = field(default_factory=dict)
    health: list[str] | None = None
    entrypoint: list[str] | None = None
    command: list[str] | None = None


def read_stages(
    path: Path, arguments: Mapping[str, str], base_environment: Mapping[str, str]
) -> list[Stage]:
    """Return all stages, built with these arguments over bases that have this environment."""
    global_arguments: dict[str, str] = {}
    stages: list[Stage] = []
    values: dict[str, str] = {}  # of the stage's ARGs
    for instruction, value in _instructions(path):
        if instruction == "FROM":
            image, *name = _substitute(value, global_arguments).split()
            stages.append(
                Stage(
                    base=image,
                    name=name[1] if name else None,
                    environment=dict(base_environment),
                )
            )
            values = {}
        elif instruction == "ARG":
            name_, _, default = value.partition("=")
            chosen = arguments.get(name_, default)
            (values if stages else global_arguments)[name_] = chosen
        else:
            _apply(stages[-1], instruction, value, values)
    return stages


def _instructions(path: Path) -> Iterator[tuple[str, str]]:
    # The parser's own variable handling knows one environment only; what it splits is used alone.
    for entry in DockerfileParser(path=str(path)).structure:
        if entry["instruction"] != "COMMENT":
            yield entry["instruction"], entry["value"]


def _apply(stage: Stage, instruction: str, value: str, values: Mapping[str, str]) -> None:
    known = {**values, **stage.environment}  # ENV wins over ARG
    if instruction == "RUN":
        # The shell puts variables in; to it, arguments are environment.
        run = Run(command=value, cwd=stage.cwd, user=stage.user, environment=known)
        stage.steps.append(run)
    elif instruction == "COPY":
        stage.steps.append(_copy(_substitute(value, known).split(), stage.cwd))
    elif instruction in ("HEALTHCHECK", "ENTRYPOINT", "CMD"):
        if instruction == "HEALTHCHECK":
            flags, _, command = value.partition("CMD ")
            stage.health_flags, stage.health = _pairs(flags), _exec_form(command)
        elif instruction == "ENTRYPOINT":
            stage.entrypoint = _exec_form(value)
        else:
            stage.command = _exec_form(value)
    else:
        # All of one instruction see the environment before it.
        _configure(stage, instruction, _substitute(value, known))


def _copy(words: list[str], cwd: str) -> Copy:
    flags = [word for word in words if word.startswith("--")]
    *sources, target = words[len(flags) :]
    origins = [flag.removeprefix("--from=") for flag in flags]
    _require(all(flag.startswith("--from=") for flag in flags), str(flags))
    return Copy(
        sources=tuple(sources), target=_join(cwd, target), stage=origins[0] if origins else None
    )


def _configure(stage: Stage, instruction: str, value: str) -> None:
    match instruction:
        case "ENV":
            stage.environment |= _pairs(value)
        case "LABEL":
            stage.labels |= _pairs(value)
        case "WORKDIR":
            stage.cwd = _join(stage.cwd, value)
        case "USER":
            stage.user = value
        case "VOLUME":
            stage.volumes += value.split()
        case "EXPOSE":
            stage.ports += value.split()
        case "STOPSIGNAL":
            stage.stop_signal = value
        case _:
            _require(False, instruction)


def _substitute(value: str, known: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: known.get(found[1] or found[2], ""), value)


def _pairs(value: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(value))


def _exec_form(value: str) -> list[str]:
    words: list[str] = json.loads(value)
    return words


def _join(cwd: str, path: str) -> str:
    return path if path.startswith("/") else f"{cwd.rstrip('/')}/{path.removeprefix('./')}"


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"tests/image cannot run this part of the Dockerfile: {what}")
