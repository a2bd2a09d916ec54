"""Measures how the products with experts are best cut into tiles on this GPU, and writes it down for the kernels.

python -m minisgl.benchmark tune-moe --model qwen3-30b-a3b [--tiles FILE]

For each number of tokens the candidates below, one product at a time, in a graph as in a decode step. The choices of
experts are drawn evenly; four of them take turns, so that weights come from memory as they do between layers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.benchmark.kernels import seconds
from minisgl.benchmark.records import check_writable, table
from minisgl.benchmark.target import Target, add_engine_arguments, target
from minisgl.kernel.triton_moe_tiles import TABLE, Product, Tiles
from minisgl.kernel.triton_runs import triton_runs

TOKENS = 2, 4, 8, 16, 64, 128, 256, 512, 1024, 4096
# columns, inputs, warps, stages, group. Few rows: the more weights on their way the better. Many: the larger the tile.
FEW_ROWS = (
    (32, 128, 4, 4, 1),
    (32, 256, 4, 3, 1),
    (64, 64, 4, 4, 1),
    (64, 64, 4, 6, 1),
    (64, 128, 4, 3, 1),
    (64, 128, 4, 4, 1),
    (64, 128, 8, 4, 1),
    (64, 256, 4, 3, 1),
    (128, 64, 4, 4, 1),
    (128, 64, 8, 4, 1),
    (128, 128, 8, 3, 1),
)
MANY_ROWS = (
    (64, 64, 4, 4, 8),
    (64, 128, 4, 3, 8),
    (128, 64, 4, 3, 8),
    (128, 64, 8, 3, 8),
    (128, 64, 8, 4, 8),
    (256, 64, 8, 3, 8),
)
GROUPS = 1, 8, 32


class Weights(NamedTuple):
    gate_up: Tensor  # [experts, 2 × size, hidden]
    down: Tensor  # [experts, hidden, size]
    top_k: int


class Best(NamedTuple):
    tiles: Tiles
    gate_up: float  # seconds
    down: float

    @property
    def seconds(self) -> float:
        return self.gate_up + self.down


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiles", type=Path, default=TABLE, metavar="FILE", help="JSON; other GPUs' entries stay")
    add_engine_arguments(parser)


@torch.inference_mode()
def main(args: argparse.Namespace) -> int:
    subject = target(args)
    config, name = subject.model_config, torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    if not triton_runs(subject.device) or not config.num_experts or subject.dtype.itemsize != 2:
        raise ValueError(
            f"tune-moe runs on a GPU, with experts in 16 bits: not {subject.name} in {subject.dtype} on {name}; "
            "give --model qwen3-30b-a3b"
        )
    check_writable(args.tiles, "--tiles")
    weights = _make_weights(subject)
    rows, entries = [["tokens", "rows", "gate_up", "µs", "down", "µs", "GB/s"]], []
    for tokens in TOKENS:
        print(f"{tokens} tokens ...", file=sys.stderr, flush=True)
        best = min((_best(weights, tokens, n) for n in _plausible_rows(tokens, weights)), key=lambda b: b.seconds)
        tiles = best.tiles
        most = tokens * config.top_k / config.num_experts
        entries.append({"most": most, "rows": tiles.rows, "gate_up": list(tiles.gate_up), "down": list(tiles.down)})
        read = (1 - (1 - config.top_k / config.num_experts) ** tokens) * (weights.gate_up.nbytes + weights.down.nbytes)
        parts = [" ".join(map(str, tiles.gate_up)), f"{best.gate_up * 1e6:.1f}"]
        parts += [" ".join(map(str, tiles.down)), f"{best.down * 1e6:.1f}", f"{read / best.seconds / 1e9:,.0f}"]
        rows.append([str(tokens), str(tiles.rows), *parts])
    print(table(rows))
    _write(args.tiles, name, entries)
    return 0


def _make_weights(subject: Target) -> Weights:
    config = subject.model_config
    experts, hidden, size = config.num_experts, config.hidden_size, config.moe_intermediate_size

    def random(*shape: int) -> Tensor:
        weight = torch.empty(shape, dtype=subject.dtype, device=subject.device)
        return weight.normal_(std=shape[-1] ** -0.5)

    return Weights(random(experts, 2 * size, hidden), random(experts, hidden, size), config.top_k)


def _plausible_rows(tokens: int, weights: Weights) -> list[int]:
    """About as many as an expert has, on average; and not so few that its weights are read again and again."""
    average = tokens * weights.top_k / len(weights.down)
    return [rows for rows in (16, 32, 64, 128) if average / 4 <= rows <= max(16, 2.5 * average)]


def _best(weights: Weights, tokens: int, rows: int) -> Best:
    from minisgl.kernel.triton_moe import group
    from minisgl.kernel.triton_moe_gemm import grouped_gate_up, grouped_product

    hidden, size = weights.down.shape[1:]
    x = torch.randn(tokens, hidden, dtype=weights.down.dtype, device=weights.down.device)
    gated = torch.randn(tokens * weights.top_k, size, dtype=x.dtype, device=x.device)
    factors = torch.rand(tokens, weights.top_k, device=x.device)
    draws = [torch.rand(tokens, len(weights.down), device=x.device).topk(weights.top_k).indices.int() for _ in range(4)]
    turns = itertools.cycle([group(draw, len(weights.down), rows) for draw in draws])

    def gate_up(product: Product) -> Callable[[], Tensor]:
        return lambda: grouped_gate_up(x, weights.gate_up, *next(turns), weights.top_k, Tiles(rows, product, product))

    def down(product: Product) -> Callable[[], Tensor]:
        return lambda: grouped_product(gated, weights.down, *next(turns), factors, Tiles(rows, product, product))

    first, first_time = _fastest(gate_up, rows, x.device)
    second, second_time = _fastest(down, rows, x.device)
    return Best(Tiles(rows, first, second), first_time, second_time)


def _fastest(make: Callable[[Product], Callable[[], Tensor]], rows: int, device: torch.device) -> tuple[Product, float]:
    from triton.runtime.errors import OutOfResources

    times: dict[Product, float] = {}

    def measure(products: list[Product]) -> Product:
        for product in products:
            try:
                times.setdefault(product, seconds(make(product), device, on_host=False))
            except OutOfResources:  # more shared memory than there is
                times[product] = float("inf")
        return min(times, key=lambda product: times[product])

    best = measure([Product(*candidate) for candidate in (FEW_ROWS if rows <= 32 else MANY_ROWS)])
    best = measure([best._replace(group=group) for group in GROUPS])
    return best, times[best]


def _write(path: Path, name: str, entries: list[dict[str, object]]) -> None:
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[name] = entries
    lines = []
    for gpu, of_gpu in known.items():
        lines.append(f"  {json.dumps(gpu)}: [\n    " + ",\n    ".join(map(json.dumps, of_gpu)) + "\n  ]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"written to {path}", file=sys.stderr)
