"""The copies of `rows` in CUDA C++, compiled for the bytes of a row. Knows no layers.

A warp copies a row, or a part of one, in packets of 16 bytes. Sizes are constants to the compiler, so that a copy is a
few loads and as many stores without a loop; the price is a compilation for each size, once a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.jit import Instance, gpu_arch, load

_THREADS = 128
_LANES = 32
_MOST_PARTS = 8


def store_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_loc: Tensor) -> None:
    """As `rows.store_rows`. Raises ValueError, naming a place in store.cu, for tensors that do not fit together."""
    head = k.shape[-1] * k.element_size()
    _store(k.device, head * k.shape[-2], head)(k, v, k_cache, v_cache, out_loc)


def gather_rows(table: Tensor, ids: Tensor, first: int) -> Tensor:
    """As `rows.gather_rows`. Raises ValueError, naming a place in gather.cu."""
    out = torch.empty((len(ids), table.shape[1]), dtype=table.dtype, device=table.device)
    _gather(table.device, table.shape[1] * table.element_size())(table, ids, first, out)
    return out


def store_instance(row: int, head: int, arch: str) -> Instance:
    """row: bytes of a token's K; head: of one head's, at a multiple of which every row begins."""
    return Instance("store.cu", f"minisgl::Store<{row}, {packet(head)}, {_THREADS}, {_early(arch)}>::run", arch)


def gather_instance(row: int, arch: str) -> Instance:
    size = packet(row)
    return Instance("gather.cu", f"minisgl::Gather<{row}, {size}, {parts(row)}, {_THREADS}, {_early(arch)}>::run", arch)


def packet(size: int) -> int:
    """Bytes of a load: as many as divide `size`, 16 at most."""
    return next(each for each in (16, 8, 4, 2, 1) if size % each == 0)


def parts(row: int) -> int:
    """Warps to a row: as many as keep all their lanes busy."""
    least = _LANES * packet(row)
    return max(
        each
        for each in (1, 2, 4, _MOST_PARTS)
        if each == 1 or (row % (each * packet(row)) == 0 and row >= each * least)
    )


def _early(arch: str) -> str:
    return "true" if int(arch.removeprefix("sm_").removesuffix("a")) >= 90 else "false"


@cache
def _store(device: torch.device, row: int, head: int) -> Callable[..., Any]:
    return load(store_instance(row, head, gpu_arch(device)))


@cache
def _gather(device: torch.device, row: int) -> Callable[..., Any]:
    return load(gather_instance(row, gpu_arch(device)))
