"""How the products with experts are cut into tiles, by how many rows an expert has: a table that was measured.

python -m minisgl.benchmark tune-moe writes it. Knows no kernel.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

TABLE = Path(__file__).parent / "triton_moe_tiles.json"


class Product(NamedTuple):
    """A program's part of one product. group: tiles that take the same columns one after another."""

    columns: int
    inputs: int
    warps: int
    stages: int
    group: int


class Tiles(NamedTuple):
    """rows: pairs of a token and an expert in a tile, all of one expert."""

    rows: int
    gate_up: Product
    down: Product


def choose_tiles(pairs: int, experts: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """For pairs of a token and one of its experts. What was measured on another kind of GPU may not fit into this
    one's shared memory, so such a GPU gets what fits everywhere."""
    if dtype.itemsize == 2:
        for most, tiles in measured(_name(device)):
            if pairs <= most * experts:
                return tiles
    return default_tiles(pairs, experts, dtype)


def default_tiles(pairs: int, experts: int, dtype: torch.dtype) -> Tiles:
    if dtype.itemsize > 2:
        return Tiles(16, Product(32, 32, 4, 2, 8), Product(32, 32, 4, 2, 8))
    rows = next((rows for rows in (16, 32) if pairs <= rows * experts), 64)
    return Tiles(rows, Product(64, 64, 4, 3, 8), Product(64, 64, 4, 3, 8))


@cache
def measured(name: str) -> list[tuple[float, Tiles]]:
    """(pairs an expert at most, tiles), ascending; the last has no limit. Empty for a GPU that was not measured."""
    entries = json.loads(TABLE.read_text(encoding="utf-8")).get(name, [])
    found = [
        (float(entry["most"]), Tiles(entry["rows"], Product(*entry["gate_up"]), Product(*entry["down"])))
        for entry in entries
    ]
    return [(float("inf") if place == len(found) - 1 else most, tiles) for place, (most, tiles) in enumerate(found)]


@cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
