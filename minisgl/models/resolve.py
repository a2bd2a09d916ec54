"""Finds the folder that a `--model` value means. Knows nothing of what is in the folder beyond its config.json."""

import re
from collections.abc import Callable
from pathlib import Path

from minisgl.models.builtin import BUILTIN, ModelNotFound, builtin_folder

__all__ = ["ModelNotFound", "resolve_model"]

Download = Callable[[str], str]  # a hub id to the folder it was fetched into

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str, source: str = "hf", download: Download | None = None) -> Path:
    """The Hugging Face folder of a model: the built-in name, a local folder, or a hub id (fetched into its own cache).

    source: the hub, "hf" or "modelscope". A folder wins over a hub id of the same spelling. Raises ModelNotFound, in
    one line, with what was given and what is allowed.
    """
    if name == BUILTIN:
        return builtin_folder()
    local = Path(name).expanduser()
    if name and local.is_dir():  # an empty name would be the current folder
        folder = local
    elif _HUB_ID.fullmatch(name):
        folder = Path(_download(name, source, download or _HUBS[source]))
    else:
        allowed = f"{BUILTIN}, a folder with a config.json, or a hub id like org/name"
        raise ModelNotFound(f"no model {name!r}: no such folder here; allowed are {allowed}")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"no model {name!r}: {folder} has no config.json; name a Hugging Face model folder")
    return folder.resolve()


def _download(name: str, source: str, download: Download) -> str:
    try:
        return download(name)
    except ImportError:
        install = f"--model-source {source} needs the package {source}: pip install {source}"
        raise ModelNotFound(f"no model {name!r}: no such folder here, and {install}, or name a local folder") from None
    except Exception as error:  # the hubs' clients have errors of many kinds
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        login = " and `hf auth login`" if source == "hf" else ""
        remedy = f"check the name, the network{login}, or name a local folder"
        raise ModelNotFound(f"no model {name!r}: no such folder here, and {source} fails ({why}): {remedy}") from error


def _from_hf(name: str) -> str:
    from huggingface_hub import snapshot_download  # a local model should not pay for the hub's client

    return snapshot_download(name, allow_patterns=_FILES)


def _from_modelscope(name: str) -> str:
    from modelscope import snapshot_download  # no dependency: few need it

    return snapshot_download(name, allow_patterns=_FILES)


_HUBS: dict[str, Download] = {"hf": _from_hf, "modelscope": _from_modelscope}
