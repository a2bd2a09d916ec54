"""Checks the tools that our C++ and CUDA kernels are made with, and the kernels. Knows no engine.

python -m minisgl.kernel.selftest [--arch sm_90]

Each line says what was looked at and, where something is missing, the remedy. Nothing that is missing stops the server:
it runs on Triton's kernels then, or on plain torch. Exit status 1 if something is broken: there, and it does not work.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator

import torch

from minisgl.core.terminal import show_any_text
from minisgl.kernel import cuda_rows, jit, rows
from minisgl.kernel.prefix import PREFIX, common_length_numpy

Line = tuple[str, str, str]  # "ok", "missing" or "broken"; of what; in words


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m minisgl.kernel.selftest", description=__doc__.splitlines()[0])
    made.add_argument("--arch", help="of a GPU that is not here, to compile for, as sm_90")
    return made


def main(argv: list[str] | None = None) -> int:
    show_any_text()
    args = parser().parse_args(argv)
    if args.arch and not re.fullmatch(r"sm_\d{2,3}a?", args.arch):
        parser().error(f"--arch is sm_ and the compute capability without its dot, as sm_90, not {args.arch!r:.40}")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    arch = args.arch or (jit.gpu_arch(device) if device else None)
    broken = False
    for state, what, words in lines(arch, device):
        print(f"{state:8}{what:14}{words}", flush=True)
        broken |= state == "broken"
    return int(broken)


def lines(arch: str | None, device: torch.device | None) -> Iterator[Line]:
    """arch: to compile for, None for no GPU's. device: the GPU to run on, None to run nothing."""
    yield "ok", "cache", f"{jit.kernel_cache()}, {len(list(jit.kernel_cache().glob('*.so')))} kernels in it"
    yield from _tried("tvm-ffi", _tvm_ffi)
    yield from _tried("C++ compiler", lambda: _compiler("cpu"))
    yield from _tried("prefix.cpp", _prefix)
    if arch is None:
        yield "missing", "GPU", "none here: --arch sm_90 compiles for one without it"
        return
    yield from _tried("nvcc", lambda: _compiler(arch))
    name = torch.cuda.get_device_name(device) if device else "none here, so kernels are compiled and not run"
    yield "ok", "GPU", f"{arch}: {name}"
    runs_on = device if device and jit.gpu_arch(device) == arch else None
    yield from _tried("store.cu", lambda: _store(arch, runs_on))
    yield from _tried("gather.cu", lambda: _gather(arch, runs_on))


def _tried(what: str, check: Callable[[], str]) -> Iterator[Line]:
    try:
        yield "ok", what, check()
    except jit.CannotCompile as error:
        yield "broken" if isinstance(error, jit.CompileFailed) else "missing", what, str(error)
    except Exception as error:  # whatever it is, it is what this command is for
        yield "broken", what, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _tvm_ffi() -> str:
    jit.require_tvm_ffi()
    return f"{jit.tvm_ffi_version()}, takes the tensors of torch {torch.__version__}"


def _compiler(arch: str) -> str:
    compiler = jit.find_compiler(arch)
    return f"{compiler.path}, release {compiler.release}"


def _prefix() -> str:
    start = time.perf_counter()
    common = jit.load(PREFIX)
    seconds = time.perf_counter() - start
    a = torch.arange(1000, dtype=torch.int32)
    for at in (0, 1, 63, 64, 500, 999):
        b = a.clone()
        b[at] = -1
        if common(a, b) != common_length_numpy(a, b):
            raise RuntimeError(f"common({at}) is {common(a, b)}")
    return f"compiled or found in {seconds:.1f} s, agrees with NumPy"


def _store(arch: str, device: torch.device | None) -> str:
    path = jit.build(cuda_rows.store_instance(8 * 128 * 2, 128 * 2, arch), jit.kernel_cache())
    if device is None:
        return f"compiled: {path.name}"
    k, v = torch.randn(2, 300, 8, 128, dtype=torch.bfloat16, device=device)
    cache, expected = torch.zeros(2, 2, 1000, 8, 128, dtype=torch.bfloat16, device=device)
    out_loc = torch.randperm(1000, device=device)[:300].int()
    cuda_rows.store_rows(k, v, cache[0], cache[1], out_loc)
    rows.store_rows(k, v, expected[0], expected[1], out_loc)
    return _equal(cache, expected)


def _gather(arch: str, device: torch.device | None) -> str:
    path = jit.build(cuda_rows.gather_instance(1024 * 2, arch), jit.kernel_cache())
    if device is None:
        return f"compiled: {path.name}"
    table = torch.randn(500, 1024, dtype=torch.bfloat16, device=device)
    ids = torch.randint(0, 1500, (300,), dtype=torch.int32, device=device)
    return _equal(cuda_rows.gather_rows(table, ids, 400), rows.gather_rows(table, ids, 400))


def _equal(out: torch.Tensor, expected: torch.Tensor) -> str:
    if not torch.equal(out, expected):
        wrong = int((out != expected).sum())
        raise RuntimeError(f"{wrong} of {out.numel()} elements differ from torch's")
    return "compiled, run, equal to torch's"


if __name__ == "__main__":
    sys.exit(main())
