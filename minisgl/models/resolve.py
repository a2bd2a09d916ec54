"""Finds the folder that a `--model` value means. Knows nothing of what is in the folder beyond its config.json."""

import re
from collections.abc import Callable
from pathlib import Path

from minisgl.models.builtin import BUILTIN, ModelNotFound, builtin_folder

__all__ = ["ModelNotFound", "resolve_model"]

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str, download: Callable[[str], str] | None = None) -> Path:
    """The Hugging Face folder of a model: the built-in name, a local folder, or a hub id (fetched into its own cache).

    A folder wins over a hub id of the same spelling. Raises ModelNotFound, in one line, with what was given and what
    is allowed.
    """
    if name == BUILTIN:
        return builtin_folder()
    local = Path(name).expanduser()
    if name and local.is_dir():  # an empty name would be the current folder
        folder = local
    elif _HUB_ID.fullmatch(name):
        folder = Path(_download(name, download or _snapshot))
    else:
        allowed = f"{BUILTIN}, a folder with a config.json, or a hub id like org/name"
        raise ModelNotFound(f"no model {name!r}: no such folder here; allowed are {allowed}")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"no model {name!r}: {folder} has no config.json; name a Hugging Face model folder")
    return folder.resolve()


def _download(name: str, download: Callable[[str], str]) -> str:
    try:
        return download(name)
    except (OSError, ValueError) as error:  # every error of the hub's client is one of these
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        remedy = "check the name, the network and `hf auth login`, or name a local folder"
        raise ModelNotFound(f"no model {name!r}: no such folder here, and the hub fails ({why}): {remedy}") from error


def _snapshot(name: str) -> str:
    from huggingface_hub import snapshot_download  # a local model should not pay for the hub's client

    return snapshot_download(name, allow_patterns=_FILES)
