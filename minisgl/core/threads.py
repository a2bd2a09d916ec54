"""How many CPU threads a process computes with. Knows nothing of what is computed, and loads torch only to tell it."""

from __future__ import annotations

import os

RANK_THREADS = 1  # of a rank beside other ranks: with two each, two busy ranks on two cores fall off a cliff


def usable_cores() -> int:
    """Those that this process may run on: a container or `taskset` may leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(threads: int | None) -> None:
    """Raises ValueError for more than there are cores. They would take turns, and each wait for the others at the end
    of every product; some thousands end the process, and not with an error of Python's."""
    cores = usable_cores()
    if threads is not None and threads > cores:
        raise ValueError(f"--threads {threads} is more than the cores that this process may use: give at most {cores}")


def set_threads(threads: int | None) -> None:
    """None leaves torch's own choice, which is every core. OpenMP keeps the number for each thread that starts
    parallel work: a thread of ours that runs the model must call this too."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
