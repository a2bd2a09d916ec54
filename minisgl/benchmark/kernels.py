"""Times the parts of a step one by one: each case of the modules `…_cases`, its fast forms beside plain torch.

python -m minisgl.benchmark kernels --model qwen3-0.6b --batch 1,64,256 --context 1024 [--only rms_norm] [--save]

On a GPU calls are replayed from a CUDA graph, as in a decode step. Inputs that fit into a cache are read from it, so
their share of memory's speed can be above 100 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from minisgl.benchmark import kernel_cases, row_cases, sampling_cases
from minisgl.benchmark.decode_step import int_list
from minisgl.benchmark.floor import read_bandwidth
from minisgl.benchmark.kernel_cases import Shape
from minisgl.benchmark.records import add_output_arguments, save, table
from minisgl.benchmark.target import add_engine_arguments, target
from minisgl.core.threads import set_threads

HEADER = ["kernel", "batch", "form", "µs", "GB/s", "of memory", "× torch"]
CASES = {**kernel_cases.CASES, **sampling_cases.CASES, **row_cases.CASES}
CALLS = 20  # in one graph
CPU_SECONDS = 0.1  # for each form


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int_list, default=[1, 64, 256], metavar="N,N", help="rows, or requests")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each request, for attention")
    parser.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help="of the device; default: measured")
    add_output_arguments(parser)
    add_engine_arguments(parser)


@torch.inference_mode()
def main(args: argparse.Namespace) -> int:
    subject = target(args)
    names = args.only.split(",") if args.only else list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise ValueError(f"--only {','.join(unknown)}: there are {', '.join(CASES)}")
    if (least := min([args.context, *args.batch])) < 1:
        raise ValueError(f"--batch and --context must be at least 1, not {least}")
    set_threads(subject.config.threads)
    bandwidth = args.bandwidth * 1e9 if args.bandwidth else read_bandwidth(subject.device)
    rows, saved = [HEADER], []
    for name in names:
        for batch in args.batch:
            print(f"{name}, batch {batch} ...", file=sys.stderr, flush=True)
            shape = Shape(
                subject.model_config, subject.dtype, subject.device, batch, args.context, subject.config.page_size
            )
            case = CASES[name](shape)
            times = {form: seconds(call, subject.device, case.on_host) for form, call in case.forms.items()}
            for form, each in times.items():
                speed, ratio = case.moved / each, times["torch"] / each if "torch" in times else 1.0
                moves = [f"{speed / 1e9:,.0f}", f"{speed / bandwidth:.0%}"] if case.moved else ["", ""]
                rows.append([name, str(batch), form, f"{each * 1e6:,.1f}", *moves, f"{ratio:.2f}"])
                setting = {"kernel": name, "form": form, "batch": batch, "context": args.context}
                measured = [("time", "µs", each * 1e6)]
                if case.moved:
                    measured += [("bandwidth", "GB/s", speed / 1e9), ("of_memory", "%", 100 * speed / bandwidth)]
                saved += [subject.record("kernel", *one, **setting) for one in measured]
    print(table(rows))
    print(f"\nmemory: {bandwidth / 1e9:,.0f} GB/s", file=sys.stderr)
    save(args, saved)
    return 0


def seconds(call: Callable[[], object], device: torch.device, on_host: bool) -> float:
    """Of one call, the median. on_host: what counts is the host's time, whatever it launches."""
    if device.type == "cuda" and not on_host:
        return _gpu_seconds(call, device)
    call()
    times: list[float] = []
    while len(times) < 5 or sum(times) < CPU_SECONDS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return statistics.median(times)


def _gpu_seconds(call: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)

    def calls() -> None:
        for _ in range(CALLS):
            call()

    replay = calls
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        replay = graph.replay
    except RuntimeError as error:
        print(f"  not in a graph, so launches count too: {str(error).splitlines()[0]:.100}", file=sys.stderr)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times)
