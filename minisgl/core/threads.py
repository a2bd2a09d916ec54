"""How many CPU threads a process computes with. Knows nothing of what is computed."""

from __future__ import annotations

import torch

RANK_THREADS = 1  # of a rank beside other ranks: with two each, two busy ranks on two cores fall off a cliff


def set_threads(threads: int | None) -> None:
    """None leaves torch's own choice, which is every core. OpenMP keeps the number for each thread that starts
    parallel work: a thread of ours that runs the model must call this too."""
    if threads is not None:
        torch.set_num_threads(threads)
