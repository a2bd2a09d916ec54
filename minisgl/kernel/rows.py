"""Copies of rows: K and V to their slots, embeddings by token id. Knows no layers.

The forms: CUDA C++ (`cuda_rows`), Triton (`triton_rows`), and the plain torch below, which is the reference. Each is a
module with these two functions.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.kernel.triton_runs import triton_runs


def store_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_loc: Tensor) -> None:
    """Write k and v, [tokens, kv_heads, head_dim], whose tokens may lie apart, at the slots out_loc, int32 or int64
    [tokens], of the caches, [slots, kv_heads, head_dim]."""
    k_cache[out_loc] = k
    v_cache[out_loc] = v


def gather_rows(table: Tensor, ids: Tensor, first: int) -> Tensor:
    """Row `ids[i] - first` of the table, [rows, width], or zeros where it has none. ids: int32 or int64 [n].
    Returns [n, width]."""
    local = ids - first
    elsewhere = (local < 0) | (local >= len(table))
    return F.embedding(local.masked_fill(elsewhere, 0), table).masked_fill_(elsewhere[:, None], 0)


def row_kernels(device: torch.device) -> dict[str, Any]:
    """The forms for a device by name. Those of CUDA C++ may still raise CannotCompile."""
    here = {"torch": sys.modules[__name__]}
    if not triton_runs(device):
        return here
    from minisgl.kernel import cuda_rows, triton_rows

    return {"cuda": cuda_rows, "triton": triton_rows, **here}
