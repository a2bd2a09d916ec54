"""TensorRT-LLM's kernels for Blackwell, which FlashInfer carries: a part of `--attn trtllm`. Knows no engine.

On Hopper there is a kernel for decode alone, `fi.XqaDecode`. These, for compute capability 10, are written to the
documented signatures and tested with stand-ins of them: no such GPU was at hand, so they were never run.
"""

from __future__ import annotations

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from torch import Tensor
from torch.nn import functional as F

from minisgl.attention.paged_rows import ExtendRows, PagedDecode, PagedRows, extend_rows
from minisgl.attention.shape import Shape
from minisgl.core.protocols import KVCache
from minisgl.core.req import Req

_WORKSPACE = 256 << 20  # bytes; zeros, which is what its counters have to start with


class FmhaPrefill:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=shape.device)

    def prepare(self, reqs: list[Req], page_table: Tensor) -> ExtendRows:
        return extend_rows(reqs, page_table, self.shape.page_size)

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: ExtendRows) -> Tensor:
        rows, s = metadata, self.shape
        return trtllm_batch_context_with_kv_cache(
            q, s.by_page(cache, layer_id), self._workspace, rows.pages, rows.lengths,
            max_q_len=rows.most, max_kv_len=rows.pages.shape[1] * s.page_size,
            bmm1_scale=s.head_dim**-0.5, bmm2_scale=1.0, batch_size=len(rows.lengths), cum_seq_lens_q=rows.starts,
            cum_seq_lens_kv=F.pad(rows.lengths.cumsum(0, dtype=torch.int32), (1, 0)), kv_layout="NHD",
        )  # fmt: skip


class FmhaDecode(PagedDecode):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.page_size)
        self.shape = shape
        self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=shape.device)

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: PagedRows) -> Tensor:
        return trtllm_batch_decode_with_kv_cache(
            q, self.shape.by_page(cache, layer_id), self._workspace, metadata.pages, metadata.lengths,
            max_seq_len=metadata.pages.shape[1] * self.page_size, bmm1_scale=self.shape.head_dim**-0.5,
            bmm2_scale=1.0, kv_layout="NHD", backend="trtllm-gen",
        )  # fmt: skip
