"""C++ and CUDA of our own: compiled through tvm-ffi at first use, kept on disk, loaded. Knows no kernel.

A file of csrc/ is a template; what is compiled is one instance of it, a shared library that exports `run`. Its name is
a hash of all that decides its contents, so that it never has to be compared with anything: the sources, the instance,
the GPU's architecture, the versions of tvm-ffi and of the compiler. mini-sglang builds its kernels likewise.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("minisgl")

CSRC = Path(__file__).with_name("csrc")
_SECONDS = 600  # for one compilation, on a machine with little of a processor


class CannotCompile(RuntimeError):
    """This machine has no kernels of ours, and why: one line with the remedy."""


class CompileFailed(CannotCompile):
    """All tools are there, and they do not work."""


@dataclass(frozen=True)
class Compiler:
    path: str
    release: str  # "13.0" of nvcc, "12.2.0" of g++
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Instance:
    """file: in csrc/. function: what `run` is, a C++ expression. arch: "sm_90", or "cpu"."""

    file: str
    function: str
    arch: str

    @property
    def source(self) -> str:
        export = f"TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, ({self.function}));"
        return f'#include <tvm/ffi/function.h>\n#include "{self.file}"\n{export}\n'


def kernel_cache() -> Path:
    """$XDG_CACHE_HOME/minisgl/kernels or ~/.cache/minisgl/kernels; it need not exist."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "minisgl" / "kernels"


def load(instance: Instance, folder: Path | None = None) -> Callable[..., Any]:
    """The function `run` of an instance, from folder (default: `kernel_cache`), compiled into it first if it is not
    there. Raises CannotCompile."""
    path = build(instance, folder or kernel_cache())
    try:
        return importlib.import_module("tvm_ffi").load_module(path).run
    except Exception as error:
        raise CompileFailed(f"{path} does not load ({_first_line(error)}): delete it to build it anew") from error


def build(instance: Instance, folder: Path) -> Path:
    """The library of an instance. Any number of processes may ask at once: one compiles, the others wait for it."""
    require_tvm_ffi()
    compiler, reason = _compiler_or_reason(instance.arch)
    name = f"{Path(instance.file).stem}-{instance.arch}-{key(instance)}"
    if compiler is None:
        if ready := sorted(folder.glob(f"{name}-*.so")):  # built elsewhere, by whatever compiler
            return ready[-1]
        raise CannotCompile(reason)
    path = folder / f"{name}-{compiler.release}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "build.lock").open("w") as lock:  # closing it, or dying, gives the lock back
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process compiles kernels: waiting for it ...")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(instance, compiler, path)
    except OSError as error:
        raise CannotCompile(f"{folder} cannot be written ({error}): free space, or set XDG_CACHE_HOME") from error
    return path


def require_tvm_ffi() -> None:
    """Raises CannotCompile where the package is not there, or would have to compile its own link to torch first."""
    if importlib.util.find_spec("tvm_ffi") is None:
        raise CannotCompile("the package tvm_ffi is not installed: pip install apache-tvm-ffi")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        raise CannotCompile(f"torch {torch.__version__} does not hand its tensors to tvm-ffi: use torch 2.10 or later")


def tvm_ffi_version() -> str:
    return importlib.import_module("tvm_ffi").__version__


def key(instance: Instance) -> str:
    """What decides the library's contents, beside the compiler's release."""
    digest = hashlib.sha256()
    for part in (instance.source, instance.arch, tvm_ffi_version(), *_sources(instance.file)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler(arch: str) -> Compiler:
    """For a GPU nvcc, for "cpu" the system's C++ compiler. Raises CannotCompile."""
    compiler, reason = _compiler_or_reason(arch)
    if compiler is None:
        raise CannotCompile(reason)
    return compiler


def gpu_arch(device: torch.device) -> str:
    """ "sm_90" for compute capability 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def _sources(file: str) -> tuple[str, ...]:
    """The file, and all headers: what it may include."""
    headers = (path for path in CSRC.iterdir() if path.suffix in (".h", ".cuh"))
    return tuple(path.read_text() for path in (CSRC / file, *sorted(headers)))


@cache
def _compiler_or_reason(arch: str) -> tuple[Compiler | None, str]:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if arch == "cpu":
        path = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        missing = "no C++ compiler is on PATH: install g++"
        flags: tuple[str, ...] = ("-fPIC",)
    else:
        path = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
        missing = "nvcc is neither on PATH nor in $CUDA_HOME/bin: install the CUDA toolkit"
        number = arch.removeprefix("sm_")
        flags = ("-gencode", f"arch=compute_{number},code={arch}", "-Xcompiler", "-fPIC")
    if path is None:
        return None, missing
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"release (\d+\.\d+)", said) or re.search(r"(\d+\.\d+\.\d+)", said)
    if found is None:
        return None, f"{path} --version does not say its version: {said.strip()[:80]!r}"
    return Compiler(path, found[1], flags), ""


def _compile(instance: Instance, compiler: Compiler, path: Path) -> None:
    libinfo = importlib.import_module("tvm_ffi.libinfo")
    includes = [CSRC, libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    log.info("compiling %s for %s, once (some seconds) ...", instance.function, instance.arch)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        source, library = Path(work) / f"instance{'.cpp' if instance.arch == 'cpu' else '.cu'}", Path(work) / path.name
        source.write_text(instance.source)
        command = [
            compiler.path, "-std=c++17", "-O3", "-shared", *compiler.flags, *(f"-I{each}" for each in includes),
            str(source), "-o", str(library), f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise CompileFailed(f"{compiler.path} did not end within {_SECONDS} s on {instance.file}") from error
        if done.returncode != 0 or not library.exists():
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            what = errors[0].strip() if errors else f"exit status {done.returncode}"
            raise CompileFailed(f"{compiler.path} {compiler.release} does not compile {instance.file}: {what:.300}")
        os.replace(library, path)  # whole, or not there
    log.info("compiled %s in %.1f s: %s", instance.file, time.perf_counter() - start, path)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
