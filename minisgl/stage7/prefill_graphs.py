"""Short prompts as CUDA graphs: a prompt of 960 tokens is 3 ms of work and 10 of launches. Knows no decode.

The batch is padded to a recorded number of tokens with one more request, whose K and V go to the dummy page; rows that
a graph has and a batch does not are empty.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage6.engine import RankEngine

log = logging.getLogger("minisgl")

_SIZES = 2048, 1536, 1024, 768, 512, 256, 128, 64  # tokens: a batch is padded by a third at most, from 192 on
_ROWS = 16  # requests of one batch, the padding included

Replay = Callable[[], None]


@runtime_checkable
class PrefillAttention(Protocol):
    """What is asked of a `GraphAttention` that prompts can be recorded with, too."""

    def init_capture_prefill(self, max_rows: int, page_table: Tensor) -> bool:
        """Make the buffers of max_rows rows. False: it cannot record prompts."""

    def prepare_for_capture(self, batch: Batch) -> object: ...

    def prepare_for_replay(self, batch: Batch) -> None: ...


class PrefillGraphs:
    def __init__(
        self, engine: RankEngine, attention: PrefillAttention, most: int, make_graph: Callable[[Replay], Replay]
    ) -> None:
        """most: tokens. attention: its buffers are there. make_graph: as for a GraphRunner."""
        self._attention, self._model, self._dummy_row = attention, engine.model, engine.table.dummy_row
        self._sizes = [size for size in _SIZES if size <= min(most, engine.max_seq_len)]
        largest, device = max(self._sizes, default=0), engine.device
        self._input_ids = torch.zeros(largest, dtype=torch.int32, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._out_loc = torch.full((largest,), engine.pool.dummy_slot, dtype=torch.int32, device=device)
        self._logits_rows = torch.zeros(_ROWS, dtype=torch.int64, device=device)
        self._hidden = torch.empty(_ROWS, engine.model_config.hidden_size, dtype=engine.dtype, device=device)
        start = time.perf_counter()
        self._replays = {size: make_graph(self._recorded(engine, size)) for size in self._sizes}
        sizes = " ".join(map(str, self._sizes))
        log.info("CUDA graphs of prompts: %s tokens, %.1f s", sizes, time.perf_counter() - start)

    def pad(self, batch: Batch) -> None:
        """Up to the next recorded number of tokens, if the batch is one that a graph can run."""
        tokens = batch.num_tokens
        fits = [size for size in self._sizes if size >= tokens]
        if batch.phase == "prefill" and fits and batch.size < _ROWS and fits[-1] > tokens:
            batch.padded_reqs = [*batch.reqs, self._padding(fits[-1] - tokens)]

    def can_run(self, batch: Batch) -> bool:
        """Counts what is prepared: the requests' lengths have advanced since."""
        return batch.phase == "prefill" and batch.padded_size <= _ROWS and len(batch.positions) in self._replays

    def replay(self, batch: Batch) -> Tensor:
        """Logits [reqs, vocab]."""
        size = len(batch.positions)
        assert batch.logits_rows is not None  # a prefill has some
        self._input_ids[:size] = batch.input_ids
        self._positions[:size] = batch.positions
        self._out_loc[:size] = batch.out_loc
        self._logits_rows[: batch.padded_size] = batch.logits_rows
        self._logits_rows[batch.padded_size :] = 0  # of a longer batch they would point past this one's tokens
        self._attention.prepare_for_replay(batch)
        self._replays[size]()
        return self._model.lm_head(self._hidden[: batch.size])

    def _padding(self, tokens: int) -> Req:
        return Req(-1, torch.zeros(tokens, dtype=torch.int32), SamplingParams(max_tokens=1), self._dummy_row)

    def _recorded(self, engine: RankEngine, size: int) -> Replay:
        batch = Batch([self._padding(size)])
        batch.input_ids, batch.positions = self._input_ids[:size], self._positions[:size]
        batch.out_loc, batch.logits_rows = self._out_loc[:size], self._logits_rows
        batch.attn_metadata = self._attention.prepare_for_capture(batch)
        context = engine.context(batch)

        def run() -> None:
            self._hidden.copy_(engine.model.model(context))

        return run


def record_prefill(engine: RankEngine, most: int, make_graph: Callable[[Replay], Replay]) -> PrefillGraphs | None:
    """None when the attention backend cannot, or nothing is wanted (most: tokens)."""
    attention = engine.attention
    if most < min(_SIZES) or not isinstance(attention, PrefillAttention):
        return None
    if not attention.init_capture_prefill(_ROWS, engine.table.device):
        return None
    return PrefillGraphs(engine, attention, most, make_graph)
