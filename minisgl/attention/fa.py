"""FlashAttention's own packages, for `--attn fa`: 3 or 4 on Hopper, 4 on Blackwell, 2 elsewhere. Knows no engine.

Dao et al., 2022, 2023; Shah et al., 2024. All three read pages in place and need no plan, so their metadata is that of
our own kernels and can be recorded. 4 compiles its kernels when they are first called, some seconds for each kind of
step; FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 makes it keep them. flash-attn-4 4.0.0b36 was run on an H200 (Hopper's
pages: from b10 on); flash-attn 2.8 and flash-attn-3 3.0 only as stand-ins with their signatures.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.attention.paged_rows import ExtendRows, PagedDecode, PagedRows, extend_rows
from minisgl.attention.shape import Shape
from minisgl.core.protocols import KVCache
from minisgl.core.req import Req

Attend = Callable[[Any, Tensor, Tensor, Tensor, PagedRows | ExtendRows, float], Tensor]


class Release(NamedTuple):
    """One FlashAttention. majors: of the compute capabilities on which it reads pages, which hold a multiple of
    page_multiple tokens. head_dims: of heads in pages."""

    name: str
    package: str  # to install, as pip names it
    module: str
    majors: tuple[int, ...]
    page_multiple: int
    head_dims: range
    attend: Attend


def attend_3(package: Any, q: Tensor, k: Tensor, v: Tensor, rows: PagedRows | ExtendRows, scale: float) -> Tensor:
    """q: [tokens, q_heads, head_dim]; k, v: [pages, page_size, kv_heads, head_dim]. Returns q's shape."""
    if isinstance(rows, ExtendRows):
        return package.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=rows.lengths, page_table=rows.pages, cu_seqlens_q=rows.starts,
            max_seqlen_q=rows.most, softmax_scale=scale, causal=True,
        )  # fmt: skip
    return package.flash_attn_with_kvcache(
        q[:, None], k, v, cache_seqlens=rows.lengths, page_table=rows.pages, softmax_scale=scale, causal=True
    )[:, 0]


def attend_4(
    package: Any, q: Tensor, k: Tensor, v: Tensor, rows: PagedRows | ExtendRows, scale: float, num_splits: int
) -> Tensor:
    """As `attend_3`. num_splits: parts that a decode row's keys are cut into; 0 for as many as fill the GPU."""
    if isinstance(rows, ExtendRows):
        return package.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=rows.starts, max_seqlen_q=rows.most, seqused_k=rows.lengths, page_table=rows.pages,
            softmax_scale=scale, causal=True,
        )[0]  # fmt: skip
    return package.flash_attn_varlen_func(
        q[:, None], k, v, seqused_k=rows.lengths, page_table=rows.pages, softmax_scale=scale, causal=True,
        num_splits=num_splits,
    )[0][:, 0]  # fmt: skip


def attend_2(package: Any, q: Tensor, k: Tensor, v: Tensor, rows: PagedRows | ExtendRows, scale: float) -> Tensor:
    """As `attend_3`. It wants the lengths summed up; the longest it only needs to be no more than."""
    if isinstance(rows, ExtendRows):
        ends = F.pad(rows.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        longest = rows.pages.shape[1] * k.shape[1]
        return package.flash_attn_varlen_func(
            q, k, v, rows.starts, ends, rows.most, longest, softmax_scale=scale, causal=True, block_table=rows.pages
        )
    return package.flash_attn_with_kvcache(
        q[:, None], k, v, cache_seqlens=rows.lengths, block_table=rows.pages, softmax_scale=scale, causal=True
    )[:, 0]


_TO_256, _BY_16 = range(8, 257, 8), range(16, 257, 16)

RELEASES = (
    Release("FlashAttention 3", "flash-attn-3", "flash_attn_interface", (9,), 1, _TO_256, attend_3),
    # It has no kernel for Hopper that cuts a row into parts, and fails when its own choice is to cut.
    Release("FlashAttention 4", "flash-attn-4", "flash_attn.cute", (9,), 1, _BY_16, partial(attend_4, num_splits=1)),
    Release(
        "FlashAttention 4", "flash-attn-4", "flash_attn.cute", (10, 11), 1, range(16, 129, 16),
        partial(attend_4, num_splits=0),
    ),
    Release("FlashAttention 2", "flash-attn", "flash_attn", (8, 9, 10, 12), 256, _TO_256, attend_2),
)  # fmt: skip


class FlashAttention(NamedTuple):
    """A release that is installed, for heads of one shape."""

    release: Release
    package: Any
    shape: Shape

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, rows: PagedRows | ExtendRows) -> Tensor:
        k, v = self.shape.by_page(cache, layer_id)
        return self.release.attend(self.package, q, k, v, rows, self.shape.head_dim**-0.5)


def flash_attention(shape: Shape) -> FlashAttention:
    """The best release for the GPU that is installed. Raises ValueError with what each of them lacks."""
    major = torch.cuda.get_device_capability(shape.device)[0]
    reasons = []
    for release in (each for each in RELEASES if major in each.majors):
        reason = lacks(release, shape)
        if reason is None:
            try:
                return FlashAttention(release, importlib.import_module(release.module), shape)
            except Exception as error:  # built for another torch, or one of its own requirements is not there
                reason = f"does not load here ({type(error).__name__}: {error!s:.200})"
        reasons.append(f"{release.name} {reason}")
    if not reasons:
        reasons.append(f"no FlashAttention reads pages on a GPU of compute capability {major}.x")
    raise ValueError(f"--attn fa: {'; '.join(reasons)}. --attn auto takes what runs here")


def lacks(release: Release, shape: Shape) -> str | None:
    """Why a release for this GPU cannot be used, None if it can."""
    if not _installed(release.module):
        return f"needs the package {release.package} (module {release.module}), which is not installed"
    if shape.page_size % release.page_multiple:
        return f"needs --page-size to be a multiple of {release.page_multiple}, not {shape.page_size}"
    dims = release.head_dims
    if shape.head_dim not in dims:
        return f"needs a head_dim that is a multiple of {dims.step} and at most {dims[-1]}, not {shape.head_dim}"
    return None


def _installed(module: str) -> bool:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of the package that it would be in
        return False
    return found is not None and found.origin is not None  # not a mere folder, as 4 alone makes of flash_attn


class FlashPrefill:
    def __init__(self, kernel: FlashAttention) -> None:
        self._kernel = kernel

    def prepare(self, reqs: list[Req], page_table: Tensor) -> ExtendRows:
        return extend_rows(reqs, page_table, self._kernel.shape.page_size)

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: ExtendRows) -> Tensor:
        return self._kernel.attend(q, layer_id, cache, metadata)


class FlashDecode(PagedDecode):
    def __init__(self, kernel: FlashAttention) -> None:
        super().__init__(kernel.shape.page_size)
        self._kernel = kernel

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: PagedRows) -> Tensor:
        return self._kernel.attend(q, layer_id, cache, metadata)
