"""Whether our Triton kernels run on a device. Imports none of them."""

from __future__ import annotations

import importlib.util

import torch


def triton_runs(device: torch.device) -> bool:
    """On CUDA GPUs of compute capability 8.0 and later, with the package `triton` (torch for GPUs brings it)."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
