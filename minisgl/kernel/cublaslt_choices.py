"""Which configuration of cuBLASLt a product gets, by its sizes: a table that was measured.

python -m minisgl.benchmark tune-linear writes it. Knows no layer.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from minisgl.kernel import cublaslt
from minisgl.kernel.cublaslt import Configuration, Plan, Product

TABLE = Path(__file__).parent / "cublaslt_choices.json"
STEP = 16  # rows between two entries; graphs are for multiples of 8, so half of them take the next one's


def plans_for(weight: Tensor) -> dict[int, Plan]:
    """By the number of rows, for those that were measured to be faster than torch's on this kind of GPU and with this
    version of the library; else none."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        return {}
    return _plans(*weight.shape, weight.device) if weight.data_ptr() % 16 == 0 else {}


@cache
def _plans(outputs: int, inputs: int, device: torch.device) -> dict[int, Plan]:
    found = {}
    for measured_rows, configuration in choices(torch.cuda.get_device_name(device), outputs, inputs).items():
        for rows in (measured_rows - STEP // 2, measured_rows):
            if (plan := Product(rows, outputs, inputs, device).plan(configuration)) is not None:
                found[rows] = plan
    return found


def choices(name: str, outputs: int, inputs: int, table: Path = TABLE) -> dict[int, Configuration]:
    """By rows, ascending. name: the GPU's."""
    of_gpu = json.loads(table.read_text(encoding="utf-8")).get(name)
    if of_gpu is None or of_gpu["version"] != cublaslt.version():
        return {}
    entries = of_gpu["products"].get(f"{outputs}x{inputs}", {})
    return {int(rows): Configuration(*map(int, numbers.split())) for rows, numbers in entries.items()}
