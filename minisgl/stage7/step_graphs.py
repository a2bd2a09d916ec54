"""Steps with prompts as CUDA graphs: a prompt of 960 tokens is 3 ms of work and 10 of launches. Knows no decode step.

Prompts, chunks, and running requests beside them alike. The batch is padded to a recorded number of tokens with one
more request, whose K and V go to the dummy page; rows that a graph has and a batch does not are empty.
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

# Tokens. From 128 on a batch is padded by a third at most, from 512 on by a quarter.
SIZES = 2048, 1792, 1536, 1280, 1024, 896, 768, 640, 512, 384, 256, 192, 128, 64
MOST_PROMPTS = 64  # of one step, the padding included

Replay = Callable[[], None]


@runtime_checkable
class StepAttention(Protocol):
    """What is asked of a `GraphAttention` that steps with prompts can be recorded with, too."""

    def can_record_steps(self) -> bool: ...

    def init_capture_steps(self, max_decode: int, max_prompts: int, max_tokens: int, page_table: Tensor) -> None:
        """Make the buffers, for so many rows of each kind."""

    def prepare_for_capture(self, batch: Batch) -> object: ...

    def prepare_for_replay(self, batch: Batch) -> None: ...


class StepGraphs:
    def __init__(
        self,
        engine: RankEngine,
        attention: StepAttention,
        sizes: list[int],
        max_decode: int,
        make_graph: Callable[[Replay], Replay],
    ) -> None:
        """sizes: tokens, descending. max_decode: running requests of a step. attention: its buffers are there.
        make_graph: as for a GraphRunner."""
        self._attention, self._model, self._dummy_row = attention, engine.model, engine.table.dummy_row
        self._sizes, self._max_decode = sizes, max_decode
        rows, device = max_decode + MOST_PROMPTS, engine.device
        self._input_ids = torch.zeros(sizes[0], dtype=torch.int32, device=device)
        self._positions = torch.zeros(sizes[0], dtype=torch.int64, device=device)
        self._out_loc = torch.full((sizes[0],), engine.pool.dummy_slot, dtype=torch.int32, device=device)
        self._logits_rows = torch.zeros(rows, dtype=torch.int64, device=device)
        self._hidden = torch.empty(rows, engine.model_config.hidden_size, dtype=engine.dtype, device=device)
        log.info("CUDA graphs: recording steps with prompts of %s tokens", " ".join(map(str, sizes)))
        self._replays = record_each(sizes, lambda size: make_graph(self._recorded(engine, size)))

    def pad(self, batch: Batch) -> None:
        """Up to the next recorded number of tokens, if the batch is one that a graph can run."""
        tokens = batch.num_tokens
        fits = [size for size in self._sizes if size >= tokens]
        if self._has_rows(batch) and fits and batch.size - batch.num_decode < MOST_PROMPTS and fits[-1] > tokens:
            batch.padded_reqs = [*batch.reqs, self._padding(fits[-1] - tokens)]

    def can_run(self, batch: Batch) -> bool:
        """Counts what is prepared: the requests' lengths have advanced since."""
        return self._has_rows(batch) and len(batch.positions) in self._replays

    def replay(self, batch: Batch) -> Tensor:
        """Logits [reqs, local_vocab]."""
        size = len(batch.positions)
        assert batch.logits_rows is not None  # a step with prompts has some
        self._input_ids[:size] = batch.input_ids
        self._positions[:size] = batch.positions
        self._out_loc[:size] = batch.out_loc
        self._logits_rows[: batch.padded_size] = batch.logits_rows
        self._logits_rows[batch.padded_size :] = 0  # of a longer batch they would point past this one's tokens
        self._attention.prepare_for_replay(batch)
        self._replays[size]()
        return self._model.lm_head(self._hidden[: batch.size])

    def _has_rows(self, batch: Batch) -> bool:
        prompts = batch.padded_size - batch.num_decode
        return batch.phase != "decode" and batch.num_decode <= self._max_decode and prompts <= MOST_PROMPTS

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


def record_each(sizes: list[int], record: Callable[[int], Replay]) -> dict[int, Replay]:
    """In this order. Every other second and at the end the log says how far it is."""
    found: dict[int, Replay] = {}
    start = told = time.perf_counter()
    for size in sizes:
        found[size] = record(size)
        now = time.perf_counter()
        if now - told > 2 or size == sizes[-1]:
            told = now
            log.info("CUDA graphs: %d of %d recorded, %.1f s", len(found), len(sizes), now - start)
    return found


def step_sizes(engine: RankEngine, most: int) -> list[int]:
    """Tokens of the steps to record, descending; empty when the attention backend cannot. most: tokens wanted."""
    if not isinstance(engine.attention, StepAttention) or not engine.attention.can_record_steps():
        return []
    return [size for size in SIZES if size <= min(most, engine.max_seq_len)]


def record_steps(
    engine: RankEngine, most: int, max_decode: int, make_graph: Callable[[Replay], Replay]
) -> StepGraphs | None:
    """None when there are no `step_sizes`."""
    attention, sizes = engine.attention, step_sizes(engine, most)
    if not sizes:
        return None
    assert isinstance(attention, StepAttention)  # others have no sizes
    attention.init_capture_steps(max_decode, MOST_PROMPTS, sizes[0], engine.table.device)
    return StepGraphs(engine, attention, sizes, max_decode, make_graph)
