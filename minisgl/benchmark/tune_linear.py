"""Measures which of cuBLASLt's configurations suit a model's large products on this GPU, and writes down what gains.

python -m minisgl.benchmark tune-linear --model llama-3.1-8b [--tp N] [--choices FILE]

For each shape of a weight and each number of rows: all that the library accepts of the algorithms that its rule offers,
a call or two each; then the few best in a graph, beside what the package takes without a table. Several weights take
turns, so that they come from memory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from minisgl.benchmark.kernels import seconds
from minisgl.benchmark.records import check_writable, table
from minisgl.benchmark.target import Target, add_engine_arguments, target
from minisgl.core.protocols import NoCommunicator
from minisgl.kernel import cublaslt
from minisgl.kernel.cublaslt import Configuration, Plan, Product
from minisgl.kernel.cublaslt_choices import STEP, TABLE
from minisgl.layers.linear import LinearReplicated, LocalLinear
from minisgl.models.fuse_linear import LARGE_WEIGHT, ROWS_FOR_HALVES, fast_product, is_better_halved
from minisgl.models.registry import create_model

ROWS = range(128, 257, STEP)  # with fewer no step was seen to gain, whatever a product alone gains
CACHE_BYTES = 200 << 20  # more than a GPU's level 2 holds
CLUSTERS = 2, 3, 4, 5  # one multiprocessor, or two or four that share: 1x1, 2x1, 4x1, 1x2
GAIN = 0.98  # of the time without a table: what is less than 2 % faster is noise


class _First(NoCommunicator):
    """Of so many ranks, for shapes: it meets nobody."""

    def __init__(self, size: int) -> None:
        self.size = size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--choices", type=Path, default=TABLE, metavar="FILE", help="JSON; other GPUs' entries stay")
    add_engine_arguments(parser)


@torch.inference_mode()
def main(args: argparse.Namespace) -> int:
    subject = target(args)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    if subject.device.type != "cuda" or subject.dtype != torch.bfloat16 or not cublaslt.version():
        raise ValueError(
            f"tune-linear runs on an NVIDIA GPU in bfloat16 with cuBLASLt, and here are {name}, {subject.dtype} and "
            f"{cublaslt.version() or 'none'}"
        )
    if not (shapes := _shapes(subject)):
        raise ValueError(
            f"{subject.name} has no weight of {LARGE_WEIGHT} elements or more on a rank of {subject.config.tp}, so no "
            "product to tune: give a larger --model, or a smaller --tp"
        )
    check_writable(args.choices, "--choices")
    rows = [["weight", "rows", "µs", "best", "configuration"]]
    for outputs, inputs in shapes:
        chosen: dict[int, str] = {}
        for count in ROWS:
            print(f"{outputs}x{inputs}, {count} rows ...", file=sys.stderr, flush=True)
            if (found := _measure(count, outputs, inputs, subject)) is None:
                continue
            usual, best, configuration = found
            numbers = " ".join(map(str, configuration)) if best < GAIN * usual else "-"
            rows.append([f"{outputs}x{inputs}", str(count), f"{usual * 1e6:.1f}", f"{best * 1e6:.1f}", numbers])
            if best < GAIN * usual:
                chosen[count] = numbers
        _write(args.choices, name, {f"{outputs}x{inputs}": chosen})
    print(table(rows))
    print(f"written to {args.choices}", file=sys.stderr)
    return 0


def _shapes(subject: Target) -> list[tuple[int, int]]:
    """[outputs, inputs] of rank 0's large weights, largest first. The head is left out: one product of a step."""
    ranks = _First(subject.config.tp)
    model = create_model(subject.model_config, ranks, 1, subject.dtype, torch.device("cpu"))  # on meta
    layers = [layer for layer in model.model.modules() if isinstance(layer, LocalLinear) and layer.bias is None]
    shapes = {(layer.weight.shape[0], layer.weight.shape[1]) for layer in layers}
    return sorted((s for s in shapes if s[0] * s[1] >= LARGE_WEIGHT), key=lambda s: -s[0] * s[1])


def _measure(rows: int, outputs: int, inputs: int, subject: Target) -> tuple[float, float, Configuration] | None:
    """Seconds without a table, with the best configuration, and that; None for what one rank makes in halves."""
    device = subject.device
    layer = LinearReplicated(inputs, outputs, bias=False).to(device, torch.bfloat16)
    if subject.config.tp == 1 and is_better_halved(layer) and rows in ROWS_FOR_HALVES:
        return None
    copies = 2 + CACHE_BYTES // layer.weight.nbytes
    weights = itertools.cycle([torch.empty_like(layer.weight).normal_(std=inputs**-0.5) for _ in range(copies)])
    x, product = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device), fast_product(layer, tuned=False)

    def usual() -> Tensor:
        layer.weight.data = next(weights)
        return product(x, None)

    before = seconds(usual, device, on_host=False)
    accepted = _accepted(Product(rows, outputs, inputs, device))
    calls = {configuration: _call(plan, x, weights) for configuration, plan in accepted}
    times = {c: seconds(calls[c], device, on_host=False) for c in _quickest(calls, device)}
    if not times:
        return None
    winner = _least(times, 1)[0]
    return min(before, seconds(usual, device, on_host=False)), times[winner], winner


def _call(plan: Plan, x: Tensor, weights: Iterator[Tensor]) -> Callable[[], Tensor]:
    return lambda: plan(x, next(weights))


def _accepted(product: Product) -> Iterator[tuple[Configuration, Plan]]:
    for like in {(c.algorithm, c.stages): c for c in product.offered()}.values():
        for tile, cluster, option in itertools.product(product.tiles(like), CLUSTERS, product.options(like)):
            configuration = like._replace(tile=tile, cluster=cluster, option=option)
            if (plan := product.plan(configuration)) is not None:
                yield configuration, plan


def _quickest(calls: dict[Configuration, Callable[[], Tensor]], device: torch.device) -> list[Configuration]:
    """The best eight by four calls each, of the best 64 by one."""
    cold = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=device)

    def time(call: Callable[[], Tensor], repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cold.zero_()  # takes longer than the host to launch what follows, of which it is to show nothing
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    once = {}
    for configuration, call in calls.items():
        with contextlib.suppress(RuntimeError):  # accepted, and not run
            call()  # the first loads the kernel
            once[configuration] = time(call, 1)
    several = {configuration: time(calls[configuration], 4) for configuration in _least(once, 64)}
    return _least(several, 8)


def _least(times: dict[Configuration, float], count: int) -> list[Configuration]:
    return sorted(times, key=lambda configuration: times[configuration])[:count]


def _write(path: Path, name: str, entries: dict[str, dict[int, str]]) -> None:
    """Entries of other GPUs, and of other weights with the same version, stay."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    before = known.get(name, {})
    products = before["products"] if before.get("version") == cublaslt.version() else {}
    known[name] = {"version": cublaslt.version(), "products": {**products, **entries}}
    path.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
