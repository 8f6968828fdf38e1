"""What a user can set: one frozen tree, from which the flags of `jaxserve serve` are made.

The command line builds it, once; nothing else reads the environment.
"""

from dataclasses import Field, dataclass, field, fields
from typing import Any

from jaxserve.errors import ConfigError


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
        "of matrices and cache; auto: bfloat16 where the processor multiplies it, else float32",
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
    max_model_len: int | None = flag(
        "most tokens of prompt and output together; default: the model's own, or what fits",
        None,
        metavar="N",
    )
    max_batch: int = flag("most sequences that decode at once", 16, metavar="N")
    kv_cache_bytes: int | None = flag(
        "bytes of KV pages; default: what the device leaves, on a CPU 1 GiB", None, metavar="N"
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
    compile_cache: str | None = flag(
        "folder of compiled programs; default: in the user's cache folder; '' turns it off",
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
        "accept chat templates, which are programs, from requests", False, action="store_true"
    )
    max_body_bytes: int = flag("largest request body", 32 << 20, metavar="N")
    log_level: str = flag(
        "least level to log", "INFO", type=str.upper, choices=("DEBUG", "INFO", "WARNING", "ERROR")
    )

    def check(self) -> None:
        """Refuse what is out of range, naming the flag."""
        least = {
            "max_batch": 1,
            "max_model_len": 2,
            "kv_cache_bytes": 1,
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
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("--api-key is empty")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is not a port (0 to 65535)")


def serve_flags() -> tuple[Field[Any], ...]:
    """Return the declared settings, in order."""
    return fields(ServeConfig)
