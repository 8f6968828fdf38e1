"""Other servers' names of this one's flags, told to who brings their command line along."""

import difflib
from collections.abc import Collection, Iterator, Sequence

_OTHERS = {
    # vLLM's
    "--chat-template": "the checkpoint's own is used; a request may bring one,"
    " with --trust-request-chat-template",
    "--enable-auto-tool-choice": "calls are always read",
    "--enable-prefix-caching": "it is on; --no-prefix-cache turns it off",
    "--gpu-memory-utilization": "--kv-cache-bytes sizes the cache",
    "--kv-cache-dtype": "--kv-dtype",
    "--max-num-seqs": "--max-batch",
    "--quantization": "--weights",
    "--reasoning-parser": "thoughts are always told apart; --reasoning-field names where",
    "--tensor-parallel-size": "one chip serves",
    "--tool-call-parser": "the checkpoint decides how calls are read",
    "--allowed-origins": "--cors-origin",
    "--trust-remote-code": "no Python of checkpoints is run",
    # llama.cpp's
    "--ctx-size": "--max-model-len, of one sequence",
    "-c": "--max-model-len, of one sequence",
    "--hf-repo": "--model",
    "-hf": "--model",
    "-m": "--model",
    "--parallel": "--max-batch",
    "-np": "--max-batch",
    "--alias": "--served-model-name",
    "--cache-type-k": "--kv-dtype",
    "--cache-type-v": "--kv-dtype",
    "--jinja": "chat templates are always used",
}


def unrecognized(arguments: Sequence[str], flags: Collection[str]) -> str:
    """Say that nobody knows these arguments, and which flags may have been meant."""
    lines = ["unrecognized arguments: " + " ".join(arguments), *_hints(arguments, flags)]
    return "\n".join(lines)


def _hints(arguments: Sequence[str], flags: Collection[str]) -> Iterator[str]:
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in _OTHERS:
            yield f"  {name}: {_OTHERS[name]}"
        elif near := difflib.get_close_matches(name, flags, n=1):
            yield f"  {name}: {near[0]}?"
