"""FlashInfer's kernels (Ye et al., 2025), for `--attn fi`: prompts, decode with a plan and without. Knows no engine.

A plan cuts a batch's work over the processors. It is made on the host from lengths that the host knows, so nothing
is waited for; its arrays reach the GPU through pinned memory. With overlap two batches are alive: each kind of plan
has two homes, used in turn, so a plan is never written over while the GPU may still read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any, NamedTuple

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from torch import Tensor

from minisgl.attention.paged_rows import PagedRows
from minisgl.attention.shape import Shape
from minisgl.attention.triton_attention import PagedDecode
from minisgl.attention.views import page_counts, pages_view, ragged_view
from minisgl.core.batch import Batch
from minisgl.core.protocols import KVCache
from minisgl.core.req import Req

_WORKSPACE = 256 << 20  # bytes: FlashInfer asks for up to this much for 256 rows


class RaggedPages(NamedTuple):
    """FlashInfer's view: the pages of all rows end to end. The host's arrays are pinned int32."""

    starts: Tensor  # [rows + 1], on the host
    pages: Tensor  # [starts[-1]], on the device
    last_lengths: Tensor  # [rows], on the host: tokens in each row's last page


@dataclass
class DecodePlan:
    """A batch, and the wrapper that its plan was made in: by the first layer, or when its graph is replayed."""

    pages: RaggedPages
    wrapper: Any = None


def ragged_pages(reqs: list[Req], page_table: Tensor, page_size: int) -> RaggedPages:
    lengths = [req.device_len for req in reqs]
    counts = page_counts(lengths, page_size)
    dense = pages_view(page_table, [req.table_idx for req in reqs], lengths, page_size)
    last = [(length - 1) % page_size + 1 for length in lengths]
    return RaggedPages(_pinned(list(accumulate(counts, initial=0))), ragged_view(dense, counts), _pinned(last))


class FlashInferPrefill:
    def __init__(self, shape: Shape, kernel: str) -> None:
        """kernel: "fa2", or "fa3" for Hopper."""
        self.shape = shape
        workspace = _workspace(shape)
        self._homes = cycle([BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel) for _ in range(2)])

    def prepare(self, reqs: list[Req], page_table: Tensor) -> Any:
        s, wrapper = self.shape, next(self._homes)
        starts = _pinned(list(accumulate((req.extend_len for req in reqs), initial=0)))
        wrapper.plan(
            starts, *ragged_pages(reqs, page_table, s.page_size), s.q_heads, s.kv_heads, s.head_dim, s.page_size,
            causal=True, q_data_type=s.dtype, kv_data_type=s.dtype,
        )  # fmt: skip
        return wrapper

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: Any) -> Tensor:
        out = torch.empty_like(q)  # what FlashInfer makes itself it first fills with zeros
        return metadata.run(q, self.shape.by_page(cache, layer_id), out=out)


class FlashInferDecode:
    """With a plan: on CUDA cores, or on tensor cores, where a group of query heads is one tile."""

    def __init__(self, shape: Shape, tensor_cores: bool) -> None:
        self.shape, self.tensor_cores = shape, tensor_cores
        self._workspace = _workspace(shape)
        self._homes = cycle([self._wrapper() for _ in range(2)])
        self._recorded: dict[int, Any] = {}

    def prepare(self, reqs: list[Req], page_table: Tensor) -> DecodePlan:
        return DecodePlan(ragged_pages(reqs, page_table, self.shape.page_size))

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: DecodePlan) -> Tensor:
        if metadata.wrapper is None:
            metadata.wrapper = next(self._homes)
            self._plan(metadata.wrapper, metadata.pages)
        return metadata.wrapper.run(q, self.shape.by_page(cache, layer_id))

    def init_capture_graph(self, max_size: int, page_table: Tensor) -> None:
        device, width = page_table.device, page_table.shape[1] // self.shape.page_size
        self._starts = torch.zeros(max_size + 1, dtype=torch.int32, device=device)
        self._pages = torch.zeros(max_size * width, dtype=torch.int32, device=device)
        self._last_lengths = torch.ones(max_size, dtype=torch.int32, device=device)
        self._dummy_page = page_table[-1:, 0] // self.shape.page_size
        self._plans = cycle([torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True) for _ in range(2)])

    def record(self, size: int) -> DecodePlan:
        wrapper = self._wrapper(
            use_cuda_graph=True, paged_kv_indptr_buffer=self._starts[: size + 1], paged_kv_indices_buffer=self._pages,
            paged_kv_last_page_len_buffer=self._last_lengths[:size],
        )  # fmt: skip
        if self._recorded:  # no two graphs run at once, and each is planned anew before it does
            wrapper._int_workspace_buffer = next(iter(self._recorded.values()))._int_workspace_buffer
        self._recorded[size] = wrapper
        one_page_each = RaggedPages(_pinned(range(size + 1)), self._dummy_page.repeat(size), _pinned([1] * size))
        self._plan(wrapper, one_page_each)
        return DecodePlan(one_page_each, wrapper)

    def replay(self, batch: Batch, metadata: DecodePlan) -> None:
        wrapper = self._recorded[batch.padded_size]
        wrapper._pin_memory_int_workspace_buffer = next(self._plans)
        self._plan(wrapper, metadata.pages)

    def _wrapper(self, **graph: Any) -> Any:
        kernel = "fa2" if self.tensor_cores else "auto"
        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=self.tensor_cores, backend=kernel, **graph
        )

    def _plan(self, wrapper: Any, pages: RaggedPages) -> None:
        s = self.shape
        wrapper.plan(*pages, s.q_heads, s.kv_heads, s.head_dim, s.page_size, q_data_type=s.dtype, kv_data_type=s.dtype)


class XqaDecode(PagedDecode):
    """TensorRT-LLM's decode kernel, which FlashInfer carries: no plan at all."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.page_size)
        self.shape = shape
        self._workspace = _workspace(shape)  # its counters start at zero, and each run leaves them at zero

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: PagedRows) -> Tensor:
        return trtllm_batch_decode_with_kv_cache(
            q, self.shape.by_page(cache, layer_id), self._workspace, metadata.pages, metadata.lengths,
            max_seq_len=metadata.pages.shape[1] * self.page_size, bmm1_scale=self.shape.head_dim**-0.5,
            bmm2_scale=1.0, kv_layout="NHD", backend="xqa",
        )  # fmt: skip


def _workspace(shape: Shape) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=shape.device)


def _pinned(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).pin_memory()
