"""What a user can set: one frozen tree, from which the flags of `jaxserve serve` are made.

The command line builds it, once; nothing else reads the environment.
"""

import re
from argparse import ArgumentTypeError
from dataclasses import Field, dataclass, field, fields
from typing import Any

from jaxserve.errors import ConfigError

TARGETS = ("cpu", "v6e:1x1")
"""What `jaxserve compile` compiles for: chips by type and number."""

PROGRAM_FLAGS = (
    "dtype",
    "weights",
    "ple_dtype",
    "head_dtype",
    "kv_dtype",
    "attention",
    "max_model_len",
    "max_batch",
    "kv_cache_bytes",
    "tokens_per_resume_point",
    "grammar_bytes",
)
"""Settings that compiled programs depend on."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?")


def size_in_bytes(text: str) -> int:
    """Read a size: bytes, or K, M, G or T of them, by 1,000 each, or by 1,024 as in KiB.

    Raises:
        ArgumentTypeError: it is none.
    """
    size = _SIZE.fullmatch(text)
    if size is None or (size[3] and not size[2]):
        raise ArgumentTypeError(f"{text!r} is no size: bytes, or such as 500M or 2GiB")
    return int(float(size[1]) * (1024 if size[3] else 1000) ** (" KMGT".index(size[2] or " ")))


def flag(help_text: str, default: Any, *, repr: bool = True, **kwargs: Any) -> Any:
    """Declare a setting: its help, its default and what argparse needs beside them."""
    return field(default=default, repr=repr, metadata={"help": help_text, **kwargs})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of `jaxserve serve`, named as their flags are. None: chosen at start-up."""

    model: str | None = flag(
        "a folder in Hugging Face's layout, a hub name (org/name), or gemma3-270m, the default",
        None,
        metavar="DIR_OR_NAME",
    )
    served_model_name: str | None = flag(
        "name that requests use; default: the --model value, for a folder its last part",
        None,
        metavar="NAME",
    )
    host: str = flag("address to listen on", "127.0.0.1")
    port: int = flag("port to listen on; 0 picks a free one", 8000)
    dtype: str = flag(
        "of matrices, products and, unless --kv-dtype says otherwise, the cache; auto: bfloat16"
        " where the processor multiplies it, else float32",
        "auto",
        choices=("auto", "bfloat16", "float32"),
    )
    weights: str = flag(
        "of linears; int4: packed, as the checkpoint holds them; bf16: in --dtype; auto: int4 on a"
        " TPU where the checkpoint is int4",
        "auto",
        choices=("auto", "bf16", "int4"),
    )
    ple_dtype: str = flag(
        "of the per-layer embedding table; int4 rounds a table that is not int4; auto: int4 on a"
        " TPU where the table is",
        "auto",
        choices=("auto", "bf16", "int4"),
    )
    head_dtype: str = flag(
        "of the table of token embeddings, which is the head as well; int8: half of bf16's bytes,"
        " rounded to 127 levels and a scale for each token, quicker on a TPU and slower on a CPU;"
        " auto and bf16: --dtype, which rounds nothing more",
        "auto",
        choices=("auto", "bf16", "int8"),
    )
    kv_dtype: str = flag(
        "of cached keys and values; int8: half of bf16's bytes, rounded to 127 levels and a scale"
        " for each token and head; auto: --dtype, which rounds nothing more",
        "auto",
        choices=("auto", "bf16", "int8"),
    )
    attention: str = flag(
        "pallas: a TPU kernel that reads keys and values in place; xla: plain JAX, which gathers"
        " them first; auto: pallas on a TPU, else xla",
        "auto",
        choices=("auto", "pallas", "xla"),
    )
    max_model_len: int | None = flag(
        "most tokens of prompt and output together; default: the model's own, or what fits",
        None,
        metavar="N",
    )
    max_batch: int = flag("most sequences that decode at once", 16, metavar="N")
    kv_cache_bytes: int | None = flag(
        "bytes of KV pages, such as 500M or 2GiB; default: what the device leaves, on a CPU 1 GiB",
        None,
        metavar="SIZE",
        type=size_in_bytes,
    )
    tokens_per_resume_point: int = flag(
        "cached tokens for which sliding layers' pages shall hold one point to resume from",
        8192,
        metavar="N",
    )
    grammar_bytes: int = flag(
        "bytes of grammars on the device; what finds no room there is guided from the host, slower",
        128 << 20,
        metavar="SIZE",
        type=size_in_bytes,
    )
    no_forced_runs: bool = flag(
        "sample every token of guided answers, also those that a grammar leaves no choice about;"
        " the answers are the same",
        False,
        action="store_true",
    )
    grammar_compile_s: float = flag(
        "CPU seconds that compiling one grammar may take; what takes more is refused",
        2.0,
        metavar="S",
    )
    grammar_compile_bytes: int = flag(
        "memory that it may take, the compiler's own included",
        1 << 30,
        metavar="SIZE",
        type=size_in_bytes,
    )
    warm_schemas: str | None = flag(
        'grammars to compile at start: a JSON list of {"json": schema}, {"regex": …} or'
        ' {"choice": […]}',
        None,
        metavar="FILE",
    )
    max_waiting_requests: int = flag(
        "sequences that may wait for their first token; more are refused with 429",
        1024,
        metavar="N",
    )
    max_waiting_tokens: int = flag(
        "prompt tokens that may wait; more are refused with 429", 1 << 20, metavar="N"
    )
    prefill_stall_factor: float = flag(
        "longest a prefill chunk may hold running streams up, in their usual steps",
        1.5,
        metavar="X",
    )
    session_grace_s: float = flag(
        "seconds that a session's cached prefix outlasts others of its age", 60.0, metavar="S"
    )
    no_prefix_cache: bool = flag("compute every prompt whole", False, action="store_true")
    no_turn_memory: bool = flag(
        "tokenize the model's turns anew when they come back, instead of taking the generated ids",
        False,
        action="store_true",
    )
    drop_from_system: tuple[str, ...] = flag(
        "regular expression; what it finds in system messages, line by line, is left out of"
        " prompts, such as a time that would keep all that follows from being cached;"
        " may be repeated",
        (),
        action="append",
        metavar="REGEX",
    )
    compile_cache: str | None = flag(
        "folder of compiled programs; default: in the user's cache folder; '' turns it off",
        None,
        metavar="DIR",
    )
    programs: str | None = flag(
        "folder of programs that `jaxserve compile` wrote for the same flags; what it holds is code"
        " and runs as such; what does not fit is compiled anew",
        None,
        metavar="DIR",
    )
    drain_s: float = flag("seconds that SIGTERM leaves running requests", 30.0, metavar="S")
    heartbeat_s: float = flag(
        "seconds between comments on a silent stream; 0: none", 15.0, metavar="S"
    )
    api_key: tuple[str, ...] = flag(
        "key that requests must bring as a bearer token; may be repeated;"
        " JAXSERVE_API_KEY in the environment holds more, separated by commas",
        (),
        repr=False,
        action="append",
        metavar="KEY",
    )
    cors_origin: tuple[str, ...] = flag(
        "origin whose web pages may call, or *; may be repeated",
        (),
        action="append",
        metavar="ORIGIN",
    )
    generation_config: str = flag(
        "auto: sample as the checkpoint's generation_config.json says where a request does not",
        "auto",
        choices=("auto", "off"),
    )
    trust_request_chat_template: bool = flag(
        "accept chat templates, which are programs, from requests: of clients that one trusts;"
        " each may run for 10 s",
        False,
        action="store_true",
    )
    max_body_bytes: int = flag(
        "largest request body, in bytes or such as 8MiB",
        32 << 20,
        metavar="SIZE",
        type=size_in_bytes,
    )
    no_strict_tools: bool = flag(
        "hold calls to their syntax only, unless a tool says strict: true",
        False,
        action="store_true",
    )
    reasoning_field: str = flag(
        "where answers tell the model's thoughts",
        "both",
        choices=("both", "reasoning", "reasoning_content", "none"),
    )
    log_level: str = flag(
        "least level to log", "INFO", type=str.upper, choices=("DEBUG", "INFO", "WARNING", "ERROR")
    )

    def check(self) -> None:
        """Refuse what is out of range, naming the flag."""
        least = {
            "max_batch": 1,
            "max_model_len": 2,
            "kv_cache_bytes": 1,
            "tokens_per_resume_point": 1,
            "grammar_bytes": 0,
            "grammar_compile_s": 0.1,
            "grammar_compile_bytes": 1 << 28,
            "max_waiting_requests": 1,
            "max_waiting_tokens": 1,
            "prefill_stall_factor": 0,
            "session_grace_s": 0,
            "drain_s": 0,
            "heartbeat_s": 0,
            "max_body_bytes": 1,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and not value >= minimum:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value} is less than the least, {minimum}"
                )
        for pattern in self.drop_from_system:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"--drop-from-system {pattern!r} is wrong: {error}") from error
        for key in self.api_key:
            check_text("--api-key (or JAXSERVE_API_KEY)", key)
        for origin in self.cors_origin:
            check_text("--cors-origin", origin)
        if self.served_model_name is not None:
            check_text("--served-model-name", self.served_model_name)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is not a port (0 to 65535)")


def check_text(what: str, text: str) -> None:
    """Refuse what no request could name, and no answer could hold."""
    if not text.strip():
        raise ConfigError(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not UTF-8") from error


def serve_flags() -> tuple[Field[Any], ...]:
    """Return the declared settings, in order."""
    return fields(ServeConfig)
