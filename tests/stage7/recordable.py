"""An engine whose decode steps can be recorded without CUDA, and a recorder that calls again what it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.core.batch import Batch
from minisgl.core.config import make_config
from minisgl.core.context import Context
from minisgl.models.config import ModelConfig
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.graph_runner import GraphEngine, Replay

MAX_SEQ_LEN = 64


class FixedDecode(NamedTuple):
    slots: Tensor  # int64 [rows, width]
    seen: Tensor  # bool [rows, 1, 1, width]


class FixedShapeAttention(PagedTorchAttention):
    """Decode reads whole rows of the table and masks: only values depend on a length, no shape does."""

    def prepare_metadata(self, batch: Batch, page_table: Tensor) -> Any:
        if batch.phase != "decode":
            return super().prepare_metadata(batch, page_table)
        device = page_table.device
        rows = torch.tensor([req.table_idx for req in batch.padded_reqs], device=device)
        lengths = torch.tensor([req.device_len for req in batch.padded_reqs], device=device)
        seen = torch.arange(page_table.shape[1], device=device) < lengths[:, None]
        return FixedDecode(page_table[rows].long(), seen[:, None, None])

    def init_capture_graph(self, max_size: int, page_table: Tensor) -> None:
        slots = torch.zeros(max_size, page_table.shape[1], dtype=torch.int64, device=page_table.device)
        self.buffers = FixedDecode(slots, torch.ones_like(slots, dtype=torch.bool)[:, None, None])

    def prepare_for_capture(self, batch: Batch) -> FixedDecode:
        return FixedDecode(*(buffer[: batch.size] for buffer in self.buffers))

    def prepare_for_replay(self, batch: Batch) -> None:
        for buffer, live in zip(self.buffers, batch.attn_metadata, strict=True):  # type: ignore[call-overload]
            buffer[: batch.padded_size] = live

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, ctx: Context) -> Tensor:
        metadata, cache = ctx.attn_metadata, ctx.kv_cache
        if not isinstance(metadata, FixedDecode):
            return super().forward(q, k, v, layer_id, ctx)
        assert cache is not None
        assert ctx.out_loc is not None
        cache.store(layer_id, k, v, ctx.out_loc)
        keys, values = (x[metadata.slots].transpose(1, 2) for x in (cache.k_cache(layer_id), cache.v_cache(layer_id)))
        out = scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=metadata.seen, enable_gqa=True)
        return out[:, :, 0]


class Recorder:
    """The fake: a graph is a function over fixed buffers, called again."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Replay) -> Replay:
        with torch.inference_mode():
            run()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


def make_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, **more: Any) -> GraphEngine:
    def create(name: str, *shape: Any) -> FixedShapeAttention:
        return FixedShapeAttention(*shape[:4])

    monkeypatch.setattr("minisgl.stage3.engine.create_attention", create)
    options = {"dtype": "float32", "device": device, "num_pages": 64, "page_size": 4, "max_running_requests": 12}
    config = make_config(OverlapConfig, {**options, "cuda_graph_max_bs": 8, **more})
    return GraphEngine(config, folder, ModelConfig.from_folder(folder), MAX_SEQ_LEN)
