"""Which communicator `--comm` means on the devices at hand. Knows no collective."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from minisgl.stage6.communicators import DistributedCommunicator
from minisgl.stage6.communicators_nccl import NcclCommunicator, WindowCommunicator, why_no_windows
from minisgl.stage6.communicators_symm import SymmetricCommunicator, why_not

log = logging.getLogger("minisgl")


def check_communicator(name: str, device: str) -> None:
    """device: "auto", "cpu" or "cuda". Raises ValueError when ranks that will be on a CPU are given a way of GPUs."""
    if name != "auto" and (device == "cpu" or not torch.cuda.is_available()):
        raise ValueError(f"--comm {name} is for ranks on GPUs, and these are on the CPU, where gloo adds: use auto")


def make_communicator(
    name: str, rank: int, size: int, device: torch.device, rendezvous: Path
) -> DistributedCommunicator:
    """name: one of `config.COMMUNICATORS`. Raises ValueError when that one cannot be here."""
    kind = communicator_class(name, size, device)
    log.info("communication of %d ranks: %s", size, "gloo" if device.type == "cpu" else kind.__name__)
    return kind(rank, size, device, rendezvous)


def communicator_class(name: str, size: int, device: torch.device) -> type[DistributedCommunicator]:
    if device.type != "cuda":
        return DistributedCommunicator
    if name in ("auto", "symm"):
        missing = why_not(size)
        if missing is None:
            return SymmetricCommunicator
        if name == "symm":
            raise ValueError(f"--comm symm cannot be used here: {missing}: use --comm auto")
        log.info("sums go through NCCL alone, not through symmetric memory: %s", missing)
    if name == "pynccl-window":
        missing = why_no_windows()
        if missing is not None:
            raise ValueError(f"--comm pynccl-window cannot be used here: {missing}: use --comm auto")
        return WindowCommunicator
    return NcclCommunicator if name == "pynccl" else DistributedCommunicator
