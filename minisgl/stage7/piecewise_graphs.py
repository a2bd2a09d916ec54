"""Steps with prompts as CUDA graphs in pieces: all between two attentions is recorded. Knows nothing of requests.

A prompt of 960 tokens is 3 ms of work and 10 of launches. But how its attention is cut over the processors depends on
every length in the batch, so that stays outside, launched by the host as ever: the graphs know a number of tokens, to
which a batch is padded, and nothing else (vLLM's piecewise graphs). They serve prompts, chunks and mixed steps alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.core.context import Context
from minisgl.layers.shard import RankHeads
from minisgl.stage6.engine import RankEngine
from minisgl.stage7.cuda_graphs import Replay

log = logging.getLogger("minisgl")

# Tokens. From 128 on a batch is padded by a third at most, from 512 on by a quarter.
SIZES = 2048, 1792, 1536, 1280, 1024, 896, 768, 640, 512, 384, 256, 192, 128, 64


class Recorder(Protocol):
    """Makes graphs one after the other, each of what is asked of the device between two calls."""

    def rehearse(self, run: Replay) -> None: ...

    def begin(self) -> None: ...

    def end(self) -> Replay: ...


class PiecewiseGraphs:
    def __init__(self, engine: RankEngine, most: int, recorder: Recorder) -> None:
        """most: tokens of the largest graph."""
        self._engine = engine
        self._sizes = [size for size in SIZES if size <= most]
        largest, model, device = max(self._sizes, default=0), engine.model_config, engine.device
        self._dummy_slot = engine.pool.dummy_slot
        self._input_ids = torch.zeros(largest, dtype=torch.int32, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._out_loc = torch.full((largest,), self._dummy_slot, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(largest, model.hidden_size, dtype=engine.dtype, device=device)
        self._between = AttentionBetween(engine, largest, recorder)
        start = time.perf_counter()
        self._pieces = {size: self._recorded(size) for size in self._sizes}
        if self._sizes:
            sizes = " ".join(map(str, self._sizes))
            log.info("CUDA graphs of steps with prompts: %s tokens, %.1f s", sizes, time.perf_counter() - start)

    def can_run(self, batch: Batch) -> bool:
        return batch.phase != "decode" and len(batch.positions) <= max(self._sizes, default=0)

    def replay(self, batch: Batch) -> Tensor:
        """Logits [padded_reqs, vocab]. Past the batch's tokens it computes in vain, and stores on the dummy page."""
        tokens = len(batch.positions)
        size = min(size for size in self._sizes if size >= tokens)
        self._input_ids[:tokens] = batch.input_ids
        self._positions[:tokens] = batch.positions
        self._out_loc[:tokens] = batch.out_loc
        self._out_loc[tokens:size] = self._dummy_slot
        self._between.live = self._engine.context(batch)
        for piece in self._pieces[size]:
            piece()
        return self._engine.model.lm_head(self._hidden[batch.logits_rows])

    def _recorded(self, size: int) -> list[Replay]:
        """The pieces of a step, graphs and attentions in turn."""
        batch = Batch([])
        batch.input_ids, batch.positions = self._input_ids[:size], self._positions[:size]
        batch.out_loc, batch.logits_rows, batch.attn_metadata = self._out_loc[:size], None, None
        context = replace(self._engine.context(batch), attention=self._between)

        def run() -> None:
            self._hidden[:size] = self._engine.model.model(context)

        return self._between.recorded(run)


class AttentionBetween:
    """In the place of the engine's attention backend while a step is recorded: ends a piece and begins the next."""

    def __init__(self, engine: RankEngine, largest: int, recorder: Recorder) -> None:
        model, heads = engine.model_config, RankHeads(engine.model_config, engine.comm.rank, engine.comm.size)
        self._attention: Any = engine.attention
        self._recorder = recorder
        self._out = torch.zeros(largest, len(heads.q()), model.head_dim, dtype=engine.dtype, device=engine.device)
        self._pieces: list[Replay] | None = None
        self.live: Context  # of the batch that is replayed

    @torch.inference_mode()
    def recorded(self, run: Replay) -> list[Replay]:
        self._recorder.rehearse(run)
        self._pieces = pieces = []
        self._recorder.begin()
        try:
            run()
        finally:  # also when it failed: a stream that records can do nothing else
            pieces.append(self._recorder.end())
            self._pieces = None
        return pieces

    def prepare_metadata(self, batch: Batch, page_table: Tensor) -> object:
        raise NotImplementedError("nothing is prepared while a step is recorded")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, ctx: Context) -> Tensor:
        return self._between(lambda n: self._attention.forward(q[:n], k[:n], v[:n], layer_id, self.live), len(q))

    def attend_cached(self, q: Tensor, layer_id: int, ctx: Context) -> Tensor:
        return self._between(lambda n: self._attention.attend_cached(q[:n], layer_id, self.live), len(q))

    def _between(self, attend: Callable[[int], Tensor], size: int) -> Tensor:
        """attend: of the first n tokens. Returns where the next piece finds what it gives, [size, q heads, dim]."""

        def attend_live() -> None:
            tokens = len(self.live.positions)
            self._out[:tokens] = attend(tokens)

        if self._pieces is not None:
            self._pieces += [self._recorder.end(), attend_live]
            self._recorder.begin()
        return self._out[:size]
