"""One way to attend for prompts, another for decoding: their kernels have nothing in common. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.core.context import Context
from minisgl.core.protocols import KVCache
from minisgl.core.req import Req


class PrefillPart(Protocol):
    """Rows of any number of new tokens."""

    def prepare(self, reqs: list[Req], page_table: Tensor) -> Any:
        """As `AttentionBackend.prepare_metadata`, of these rows alone."""

    def attend(self, q: Tensor, layer_id: int, cache: KVCache, metadata: Any) -> Tensor:
        """K and V of all tokens are in the cache. q: [tokens, q_heads, head_dim]; returns its shape."""


class DecodePart(PrefillPart, Protocol):
    """Rows of one new token. See `stage7.graph_runner.GraphAttention` for what graphs ask."""

    def init_capture_graph(self, max_size: int, page_table: Tensor) -> None: ...

    def record(self, size: int) -> Any:
        """The metadata to record a graph of `size` rows with."""

    def replay(self, batch: Batch, metadata: Any) -> None:
        """Put the batch's metadata where the graph of its padded size reads it."""


class HybridMetadata(NamedTuple):
    num_decode: int
    decode: Any  # None: no such rows
    prefill: Any


class HybridAttention:
    """`--attn PREFILL,DECODE`. K and V are stored first, by `forward` or, with its callers' consent, before it:
    `attend_cached` is for a kernel that turns q and k and stores in one go."""

    def __init__(
        self, prefill: PrefillPart, decode: DecodePart, recorded_steps: Callable[..., Any] | None = None
    ) -> None:
        """recorded_steps: makes the RecordedSteps of steps with prompts, (max_decode, max_prompts, max_tokens,
        page_table), when both parts can be recorded with them. None: they cannot."""
        self.prefill, self.decode, self._recorded_steps = prefill, decode, recorded_steps

    def prepare_metadata(self, batch: Batch, page_table: Tensor) -> HybridMetadata:
        reqs = batch.padded_reqs
        num_decode = len(reqs) if batch.phase == "decode" else batch.num_decode
        return HybridMetadata(
            num_decode,
            self.decode.prepare(reqs[:num_decode], page_table) if num_decode else None,
            self.prefill.prepare(reqs[num_decode:], page_table) if num_decode < len(reqs) else None,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, ctx: Context) -> Tensor:
        if ctx.kv_cache is None or ctx.out_loc is None:
            raise ValueError("HybridAttention needs a context with kv_cache and out_loc")
        ctx.kv_cache.store(layer_id, k, v, ctx.out_loc)
        return self.attend_cached(q, layer_id, ctx)

    def attend_cached(self, q: Tensor, layer_id: int, ctx: Context) -> Tensor:
        """As `forward`, when the cache holds K and V of the new tokens already."""
        metadata, cache = ctx.attn_metadata, ctx.kv_cache
        if not isinstance(metadata, HybridMetadata) or cache is None:
            raise ValueError("HybridAttention needs a context with its own attn_metadata and kv_cache")
        n = metadata.num_decode
        if metadata.prefill is None:
            return self.decode.attend(q, layer_id, cache, metadata.decode)
        if metadata.decode is None:
            return self.prefill.attend(q, layer_id, cache, metadata.prefill)
        decoded = self.decode.attend(q[:n], layer_id, cache, metadata.decode)
        return torch.cat((decoded, self.prefill.attend(q[n:], layer_id, cache, metadata.prefill)))

    def init_capture_graph(self, max_size: int, page_table: Tensor) -> None:
        self.decode.init_capture_graph(max_size, page_table)

    def can_record_steps(self) -> bool:
        return self._recorded_steps is not None

    def init_capture_steps(self, max_decode: int, max_prompts: int, max_tokens: int, page_table: Tensor) -> None:
        assert self._recorded_steps is not None  # can_record_steps
        self._steps = self._recorded_steps(max_decode, max_prompts, max_tokens, page_table)

    def prepare_for_capture(self, batch: Batch) -> HybridMetadata:
        if batch.phase != "decode":
            return HybridMetadata(0, None, self._steps.of(batch.num_tokens))
        return HybridMetadata(batch.padded_size, self.decode.record(batch.padded_size), None)

    def prepare_for_replay(self, batch: Batch) -> None:
        assert isinstance(batch.attn_metadata, HybridMetadata)  # prepare_metadata gave it
        if batch.phase == "decode":
            self.decode.replay(batch, batch.attn_metadata.decode)
        else:
            self._steps.fill(batch.attn_metadata.decode, batch.attn_metadata.prefill)
