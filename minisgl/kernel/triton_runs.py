"""Whether our Triton kernels run on a device, and how they may be launched. Imports none of them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path

import torch


def triton_runs(device: torch.device) -> bool:
    """On CUDA GPUs of compute capability 8.0 and later, with the package `triton` (torch for GPUs brings it) and what
    that needs itself."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and no_compiler() is None


@cache
def no_compiler() -> str | None:
    """What is missing to compile Triton's own link to the driver, in C: without it the first kernel would end the step.
    None: nothing, or this Triton's link comes compiled, as 3.9's does."""
    try:
        driver = importlib.import_module("triton.backends.nvidia.driver")
    except ImportError:
        return None
    if not hasattr(driver, "compile_module_from_src"):
        return None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):  # as it looks for one
        return "triton needs a C compiler, and there is none: install gcc, or set CC"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not header.exists():
        return f"triton needs Python's headers, and there is no {header}: install python3-dev"
    return None


@cache
def launches_early(device: torch.device) -> bool:
    """Whether a kernel may be put on the GPU while the one before it still runs (programmatic dependent launch, Hopper
    and later). Such a kernel says at its start that the next may come too, and waits before it reads what others write;
    each of ours does, so a chain of them stays in order. A launch then costs a decode step 0.2 µs instead of 0.8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
