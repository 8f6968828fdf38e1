"""From what a user calls a model (a folder, a hub name, the demo model) to the folder with it."""

import re
from pathlib import Path

from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.hub.demo import DEMO_MODEL_NAME, fetch_gemma3_270m

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NEEDED = ("config.json", "tokenizer.json", "*.safetensors")
# No pickles, no GGUF, no images: only what is read.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]


def resolve_model(name_or_dir: str | None, *, cache_dir: Path) -> Path:
    """Return the checkpoint folder of a model, fetching what is not there.

    Args:
        name_or_dir: a folder, a hub name `org/name`, or the demo model's name, as None is.
        cache_dir: where the demo model goes. Hub models go where `huggingface_hub` keeps them.

    Raises:
        ConfigError: the name means nothing, the model cannot be had, or an extra is missing.
    """
    if name_or_dir is None or name_or_dir == DEMO_MODEL_NAME:
        return fetch_gemma3_270m(cache_dir)
    folder = Path(name_or_dir).expanduser()
    if name_or_dir and folder.is_dir():  # an empty path would be the current folder
        return folder
    if _HUB_NAME.fullmatch(name_or_dir):
        return _download(name_or_dir)
    raise ConfigError(
        f"--model {name_or_dir!r} is neither a folder, nor a hub name (org/name), "
        f"nor {DEMO_MODEL_NAME!r}"
    )


def check_folder(name_or_dir: str | None) -> None:
    """Refuse a folder, where it is one, that lacks what every model has.

    Raises:
        ModelLoadError: naming what is missing.
    """
    folder = Path(name_or_dir or "").expanduser()
    if not name_or_dir or not folder.is_dir():
        return
    missing = [name for name in _NEEDED if not any(folder.glob(name))]
    if missing:
        raise ModelLoadError(
            f"--model {name_or_dir}: the folder {folder.resolve()} holds no model: it has no"
            f" {', no '.join(missing)}"
        )


def _download(repo_id: str) -> Path:
    """Return the hub model's folder in huggingface_hub's cache; that library shows the progress."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"--model {repo_id}: there is no such folder, and downloading needs an extra: "
            "install the extra `hf` (in a checkout `scripts/install demo,hf`)"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=_HUB_PATTERNS))
    except GatedRepoError as error:
        raise ConfigError(
            f"--model {repo_id}: the hub wants its terms accepted and a token "
            f"(HF_TOKEN, or `hf auth login`): {error}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"--model {repo_id}: there is no such folder, and the hub has no such model, or it is "
            f"private: {error}"
        ) from error
    # Every other hub or network error is an OSError; a name that the hub refuses is a ValueError.
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {repo_id}: there is no such folder, and its download failed: {error}"
        ) from error
