"""`python -m minisgl.benchmark.all_reduce_rank WANTED RANK`: one rank of `benchmark all_reduce`. Prints times as JSON.

"left" leaves the sum in the buffer, for a consumer that reads it there; "there" also finds the terms in it, as if their
producer had written them so.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.stage6.communicators import DistributedCommunicator, rank_device
from minisgl.stage6.communicators_nccl import NcclCalls, Window
from minisgl.stage6.communicators_symm import SymmetricBuffer, why_not
from minisgl.stage6.rank_main import end_process

CALLS = 50  # in one graph, or one after the other
REPEATS = 10
MOST_SYMMETRIC = 32 << 20  # bytes: what is larger is NCCL's for certain

Sum = Callable[[Tensor], Tensor]


def main(wanted: dict[str, Any], rank: int) -> None:
    device = rank_device(wanted["device"], rank)
    comm = DistributedCommunicator(rank, wanted["size"], device, Path(wanted["meet"]))
    forms = ways(comm, wanted["windows"])
    found = []
    for rows in wanted["rows"]:
        x = torch.zeros(rows, wanted["hidden"], dtype=torch.bfloat16, device=device)
        times: dict[bool, dict[str, float]] = {False: {}, True: {}}
        for name, add in forms.items():
            for in_graph, seconds in timings(comm, name, add, x).items():
                times[in_graph][name] = seconds * 1e6
        found += [{"rows": rows, "graph": in_graph, "µs": some} for in_graph, some in times.items() if some]
    if rank == 0:
        print(json.dumps(found))
    comm.close()
    end_process(0)


def ways(comm: DistributedCommunicator, windows: bool) -> dict[str, Sum]:
    if comm.device.type != "cuda":
        return {"gloo": comm.sum}
    calls = NcclCalls(comm)
    forms: dict[str, Sum] = {"nccl": comm.sum, "pynccl": calls.all_reduce}
    if windows:
        forms["pynccl window"] = Window(calls).all_reduce
    missing = why_not(comm.size)
    if missing is not None:
        print(f"no symmetric memory: {missing}", file=sys.stderr)
        return forms
    buffer = SymmetricBuffer(comm, MOST_SYMMETRIC, MOST_SYMMETRIC)
    ops, group = torch.ops.symm_mem, buffer.group
    return forms | {
        "one-shot": buffer.one_shot,
        "torch one-shot": lambda x: ops.one_shot_all_reduce_copy_out(buffer.like(x), x, "sum", group, x),
        "two-shot": buffer.two_shot,
        "two-shot left": lambda x: ops.two_shot_all_reduce_(buffer.like(x).copy_(x), "sum", group),
        "two-shot there": lambda x: ops.two_shot_all_reduce_(buffer.like(x), "sum", group),
    }


def timings(comm: DistributedCommunicator, name: str, add: Sum, x: Tensor) -> dict[bool, float]:
    """Seconds of one call, the slowest rank's median: as it is, and (True) in a graph where there are graphs."""
    if "shot" in name and x.nbytes > MOST_SYMMETRIC:
        return {}

    def calls() -> None:
        for _ in range(CALLS):
            add(x)

    found = {False: _seconds(comm, calls, lambda: add(x), x.device)}
    if x.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        found[True] = _seconds(comm, graph.replay, lambda: add(x), x.device)
    return found


def _seconds(
    comm: DistributedCommunicator, run: Callable[[], object], meet: Callable[[], object], device: torch.device
) -> float:
    """meet: a call that is not counted, so that the devices begin together."""
    times = []
    for _ in range(REPEATS + 2):
        comm.barrier()
        meet()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            begin = time.perf_counter()
            run()
            seconds = time.perf_counter() - begin
        times.append(seconds / CALLS)
    return comm.extremes(round(statistics.median(times[2:]) * 1e9))[1] / 1e9


if __name__ == "__main__":
    with torch.inference_mode():
        main(json.loads(sys.argv[1]), int(sys.argv[2]))
