"""An engine without weights on a clock of its own: what the scheduler asks of one, and how long it would take.

Knows nothing of arrivals. Nothing is computed: a step moves the virtual clock by what a cost model says, and lengths
alone decide when a request ends. After Vidur (Agrawal et al. 2024), but with the real scheduler in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from minisgl.core.batch import Batch, ForwardOutput
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.kernel.device import pool_terms
from minisgl.stage3.page_pool import KVCachePool
from minisgl.stage3.page_table import PageTable
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.cost_model import CostModel, StepShape

TOKEN_IDS = 2**31 - 1  # a prime; no model's vocabulary: nothing looks at an id but the prefix cache
_STREAM, _POSITION, _MIX = 1_181_783_497, 741_103_597, 1_664_525_923
IntOrArray = TypeVar("IntOrArray", int, np.ndarray)
_NONE = torch.empty(0, dtype=torch.int64)


def token_ids(streams: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
    """The token at each position of a stream of text: int64 [n]. Two streams agree at no position, so texts share a
    prefix exactly if they are made of the same streams. Streams are below 2**31 - 1."""
    return (streams * _STREAM + positions * _POSITION) % TOKEN_IDS


def in_vocabulary(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """The same for a model, whose ids are below vocab_size: two streams agree at some positions, by chance."""
    return ids if vocab_size == TOKEN_IDS else (ids ^ ids >> 15) * _MIX % TOKEN_IDS % vocab_size


def answer_stream(uid: IntOrArray) -> IntOrArray:
    """The stream of what a request generates. Those of prompts are even."""
    return 2 * uid + 1


class VirtualClock:
    """Nanoseconds since the start of the simulation, moved by whoever works."""

    def __init__(self) -> None:
        self.now = 0

    def advance(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)

    def wait_until(self, time_ns: int) -> None:
        self.now = max(self.now, time_ns)


class VirtualTracer(Tracer):
    """A tracer whose time is the virtual clock's."""

    def __init__(self, path: str | Path | None, clock: VirtualClock) -> None:
        super().__init__(path)
        self.clock = clock

    def now(self) -> int:
        return self.clock.now


class VirtualEvent(NamedTuple):
    """Waiting for it takes no time but the clock's."""

    clock: VirtualClock
    time_ns: int

    def synchronize(self) -> None:
        self.clock.wait_until(self.time_ns)


class SimulatedPool(NamedTuple):
    """A KV pool without memory."""

    num_pages: int
    page_size: int

    @property
    def dummy_slot(self) -> int:
        return self.num_pages * self.page_size


class NoSampler:
    def prepare(self, reqs: Sequence[Req], eos_ids: frozenset[int], token_pool: Tensor) -> None:
        """Nothing is sampled."""


class Launch(NamedTuple):
    """What `prepare` leaves for `forward_batch`, whose lengths have advanced by then."""

    shape: StepShape
    uids: list[int]
    lengths: list[int]  # with all the tokens that this step computes

    @classmethod
    def of(cls, batch: Batch) -> Launch:
        """As `StepShape.of`: before the lengths advance."""
        return cls(StepShape.of(batch), [req.uid for req in batch.reqs], [req.device_len for req in batch.reqs])

    @property
    def extended(self) -> tuple[int, ...]:
        """The uids of shape.extends."""
        return tuple(self.uids[self.shape.num_decode :])

    def answers(self, ends: np.ndarray | None, vocab_size: int = TOKEN_IDS) -> Tensor:
        """The next token of each request's own stream, or vocab_size where it ends: int32 [reqs]. ends: int64 [uids],
        the tokens, prompt and answer, of each request at its own end; None: it takes all that it asks for."""
        uids, positions = np.array(self.uids, dtype=np.int64), np.array(self.lengths, dtype=np.int64)
        ids = in_vocabulary(token_ids(answer_stream(uids), positions), vocab_size)
        if ends is not None:
            ids[positions + 1 == ends[uids]] = vocab_size
        return torch.from_numpy(ids.astype(np.int32))


class Step(NamedTuple):
    """What one forward computed, and when. Times in nanoseconds of the virtual clock."""

    start: int
    end: int
    shape: StepShape
    extended: tuple[int, ...]  # the uids of shape.extends


class SimulatedEngine:
    """Takes the place of stage 3's Engine under a Scheduler. On one thread."""

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostModel,
        max_seq_len: int,
        tracer: VirtualTracer,
        ends: np.ndarray | None = None,
    ) -> None:
        """tracer: the scheduler's, whose clock this engine moves. ends: as in `Launch.answers`."""
        self.clock, self.cost, self.tracer, self.max_seq_len = tracer.clock, cost, tracer, max_seq_len
        self.device = torch.device("cpu")  # where the scheduler keeps its tables
        self.pool = SimulatedPool(config.num_pages or pool_pages(config, cost, max_seq_len), config.page_size)
        rows = config.max_running_requests
        self.table = PageTable(rows, max_seq_len, config.page_size, self.pool.dummy_slot, self.device)
        self.dummy_req = Req(-1, torch.zeros(1, dtype=torch.int32), SamplingParams(max_tokens=1), rows)
        self.ends = ends
        self.sampler = NoSampler()
        self.steps: list[Step] = []

    def pad(self, batch: Batch) -> None:
        """Steps of any size are launched as they are."""

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The host's part of a step. No token is looked up, so the index tuple is empty."""
        batch.attn_metadata = launch = Launch.of(batch)
        batch.positions = batch.out_loc = _NONE
        batch.logits_rows = None
        self.clock.advance(self.cost.host_seconds(launch.shape))
        return _NONE, _NONE

    def forward_batch(self, batch: Batch, args: None) -> ForwardOutput:
        """The device's part: takes its time, and gives each request the next token of its own stream, or its end."""
        launch = cast(Launch, batch.attn_metadata)
        shape = launch.shape
        start = self.clock.now
        self.clock.advance(self.cost.device_seconds(shape))
        self.steps.append(Step(start, self.clock.now, shape, launch.extended))
        if self.tracer.enabled:
            sizes = {"tokens": shape.num_tokens, "requests": shape.num_requests}
            self.tracer.complete(batch.phase, start, self.clock.now, "device", **sizes)
        tokens = launch.answers(self.ends)
        return ForwardOutput(tokens, tokens, VirtualEvent(self.clock, self.clock.now))


def pool_pages(config: SchedulerConfig, cost: CostModel, max_seq_len: int) -> int:
    """As many pages as stage 3's engine would make. Raises ValueError when there is no room for one."""
    model, size, device = cost.model, config.page_size, cost.device
    dtype = getattr(torch, device.dtype)
    each = KVCachePool.page_bytes(model.num_layers, size, model.num_kv_heads, model.head_dim, dtype)
    terms = pool_terms(torch.device(device.type), config.memory_ratio, device.memory, cost.model_bytes)
    pages = min(config.max_running_requests * -(-max_seq_len // size), KVCachePool.pages_in_budget(*terms, each))
    if pages < 1:
        raise ValueError(f"{cost.model_bytes >> 20} MiB of weights leave no room for a page on {device.name}")
    return pages
