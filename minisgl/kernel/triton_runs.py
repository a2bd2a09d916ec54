"""Whether our Triton kernels run on a device, and how they may be launched. Imports none of them."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


def triton_runs(device: torch.device) -> bool:
    """On CUDA GPUs of compute capability 8.0 and later, with the package `triton` (torch for GPUs brings it)."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def launches_early(device: torch.device) -> bool:
    """Whether a kernel may be put on the GPU while the one before it still runs (programmatic dependent launch, Hopper
    and later). Such a kernel says at its start that the next may come too, and waits before it reads what others write;
    each of ours does, so a chain of them stays in order. A launch then costs a decode step 0.2 µs instead of 0.8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
