"""The copies of `rows` in Triton. Knows no layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton_runs import launches_early


def store_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_loc: Tensor) -> None:
    """As `rows.store_rows`."""
    size, pdl = k.shape[1] * k.shape[2], launches_early(k.device)
    _store_rows[(len(out_loc), 2)](
        k, v, k_cache, v_cache, out_loc, k.stride(0), v.stride(0), size, triton.next_power_of_2(size), pdl,
        launch_pdl=pdl,
    )  # fmt: skip


def gather_rows(table: Tensor, ids: Tensor, first: int) -> Tensor:
    """As `rows.gather_rows`."""
    (rows, width), pdl = table.shape, launches_early(table.device)
    out = torch.empty((len(ids), width), dtype=table.dtype, device=table.device)
    block = min(1024, triton.next_power_of_2(width))
    grid = (len(ids), triton.cdiv(width, block))
    _gather_rows[grid](table, ids, first, out, rows, width, block, pdl, launch_pdl=pdl)
    return out


@triton.jit
def _store_rows(  # type: ignore[no-untyped-def]
    k, v, k_cache, v_cache, out_loc, k_apart, v_apart, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(out_loc + token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    if tl.program_id(1) == 0:
        tl.store(k_cache + slot * size + column, tl.load(k + token * k_apart + column, mask=inside), mask=inside)
    else:
        tl.store(v_cache + slot * size + column, tl.load(v + token * v_apart + column, mask=inside), mask=inside)


@triton.jit
def _gather_rows(  # type: ignore[no-untyped-def]
    table, ids, first, out, rows, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + i).to(tl.int64) - first
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    here = (row >= 0) & (row < rows)
    value = tl.load(table + row * width + column, mask=inside & here, other=0)
    tl.store(out + i * width + column, value, mask=inside)
