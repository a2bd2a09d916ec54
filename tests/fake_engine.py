"""An engine without weights whose tokens depend on what lies in its pages: a wrong slot gives a wrong token.

The KV of a token is its id, and the next token is a hash of the KV of all tokens before it. `plain_loop` is the
same function of the ids themselves, without pages, batches or a scheduler.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from minisgl.core.batch import Batch, ForwardOutput
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.kernel.device import DoneEvent
from minisgl.stage3.page_table import PageTable

VOCAB = 50
EOS = 0


class FakeEngine:
    """What `Scheduler` asks of an engine, and nothing more."""

    def __init__(self, num_pages: int, page_size: int, num_rows: int, max_seq_len: int) -> None:
        self.device = torch.device("cpu")
        self.max_seq_len = max_seq_len
        self.pool = SimpleNamespace(num_pages=num_pages, dummy_slot=num_pages * page_size)
        self.table = PageTable(num_rows, max_seq_len, page_size, self.pool.dummy_slot, self.device)
        self.dummy_req = Req(-1, torch.zeros(1, dtype=torch.int32), SamplingParams(max_tokens=1), num_rows)
        self.sampler = SimpleNamespace(prepare=lambda reqs, eos_ids, token_pool: None)
        self.kv = torch.full(((num_pages + 1) * page_size,), -1, dtype=torch.int32)
        self.computed_tokens = 0
        self.batches: list[list[str]] = []

    def pad(self, batch: Batch) -> None:
        pass

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = torch.cat([torch.full((req.extend_len,), req.table_idx) for req in batch.reqs])
        positions = torch.cat([torch.arange(req.cached_len, req.device_len) for req in batch.reqs])
        batch.positions, batch.out_loc = positions, self.table.device[rows, positions]
        batch.attn_metadata = [self.table.slots(req.table_idx, req.device_len) for req in batch.reqs]
        self.batches.append([f"{req.uid}:{req.cached_len}-{req.device_len}" for req in batch.reqs])
        return rows, positions

    def forward_batch(self, batch: Batch, args: Any) -> ForwardOutput:
        self.kv[batch.out_loc.long()] = batch.input_ids
        self.computed_tokens += len(batch.input_ids)
        tokens = [next_token(self.kv[slots.long()].tolist()) for slots in batch.attn_metadata]  # type: ignore[attr-defined]
        out = torch.tensor(tokens, dtype=torch.int32)
        return ForwardOutput(out, out, DoneEvent())


def next_token(ids: list[int]) -> int:
    return zlib.crc32(bytes(i % 256 for i in ids)) % VOCAB


def plain_loop(prompt: list[int], max_tokens: int) -> tuple[list[int], str]:
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(next_token(ids))
        if ids[-1] == EOS:
            return ids[len(prompt) :], "stop"
    return ids[len(prompt) :], "length"
