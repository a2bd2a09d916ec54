"""Decode steps as CUDA graphs: a few hundred kernels with one launch. Knows nothing of requests but how many.

A graph is recorded for some batch sizes, from large to small so that the small ones fit into the large ones' memory
(the walk-through's 5.3). It reads and writes fixed addresses: a step is copied into the buffers that it was recorded
with, padded to its size with dummy requests, whose K and V go to the dummy page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.core.protocols import AttentionBackend
from minisgl.kernel.device import free_memory
from minisgl.learn import exercise
from minisgl.moe.layer import waits_for_host
from minisgl.stage6.communicators import DistributedCommunicator
from minisgl.stage6.engine import RankEngine
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.graph_memory import GraphMemory, graph_memory
from minisgl.stage7.step_graphs import StepGraphs, record_each, record_steps, step_sizes

log = logging.getLogger("minisgl")

Replay = Callable[[], None]


@runtime_checkable
class GraphAttention(AttentionBackend, Protocol):
    """An attention backend whose decode metadata can stay where it is."""

    def init_capture_graph(self, max_size: int, page_table: Tensor) -> None:
        """Make the buffers that the metadata of every recorded batch, of up to max_size requests, are views of."""

    def prepare_for_capture(self, batch: Batch) -> object:
        """The metadata to record a batch of dummy requests with."""

    def prepare_for_replay(self, batch: Batch) -> None:
        """Copy batch.attn_metadata into the buffers, for all of batch.padded_reqs and leaving nothing of an earlier
        step behind. Runs on the engine's stream, and does not wait."""


class GraphRunner:
    def __init__(
        self, engine: RankEngine, attention: GraphAttention, sizes: list[int], make_graph: Callable[[Replay], Replay]
    ) -> None:
        """sizes: descending. make_graph: records what a function asks of the device, and returns what repeats it."""
        self._dummy_req, self._attention = engine.dummy_req, attention
        self._sizes = sizes
        largest, device = sizes[0], engine.device
        self._input_ids = torch.zeros(largest, dtype=torch.int32, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._out_loc = torch.full((largest,), engine.pool.dummy_slot, dtype=torch.int32, device=device)
        attention.init_capture_graph(largest, engine.table.device)
        self._model = engine.model
        self._hidden = torch.empty(largest, engine.model_config.hidden_size, dtype=engine.dtype, device=device)
        log.info("CUDA graphs: recording %d batch sizes: %s", len(sizes), " ".join(map(str, sizes)))
        self._replays = record_each(sizes, lambda size: make_graph(self._recorded(engine, size)))

    @exercise("7.4")
    def pad(self, batch: Batch) -> None:
        """Up to the next recorded size, if the batch is one that a graph can run."""
        sizes = [size for size in self._sizes if size >= batch.size]
        if batch.phase == "decode" and sizes:
            batch.padded_reqs = batch.reqs + [self._dummy_req] * (sizes[-1] - batch.size)

    @exercise("7.4")
    def can_run(self, batch: Batch) -> bool:
        """Whether it is a decode step of a recorded size, the padding included."""
        return batch.phase == "decode" and batch.padded_size in self._replays

    @exercise("7.5")
    def replay(self, batch: Batch) -> Tensor:
        """Give the graph what the step reads, and run it. Logits [reqs, local_vocab], without the padding's.

        The head stands outside the graph: it is one kernel, and its output, the only large one of a step, then needs no
        memory of its own in each graph, nor a copy out of it.
        """
        size = batch.padded_size
        self._input_ids[:size] = batch.input_ids
        self._positions[:size] = batch.positions
        self._out_loc[:size] = batch.out_loc
        self._attention.prepare_for_replay(batch)
        self._replays[size]()
        return self._model.lm_head(self._hidden[: batch.size])

    def _recorded(self, engine: RankEngine, size: int) -> Replay:
        batch = Batch([engine.dummy_req] * size, num_decode=size)
        batch.input_ids, batch.positions = self._input_ids[:size], self._positions[:size]
        batch.out_loc, batch.logits_rows = self._out_loc[:size], None
        batch.attn_metadata = self._attention.prepare_for_capture(batch)
        context = engine.context(batch)

        def run() -> None:
            self._hidden[:size] = engine.model.model(context)

        return run


class GraphEngine(RankEngine):
    """Adds to the step "graphs". Where there are none it launches layer by layer, as its base does."""

    config: OverlapConfig

    def reserved_bytes(self) -> int:
        return self.graph_memory().total

    def graph_memory(self) -> GraphMemory:
        """As counted, from what will be recorded."""
        decode, steps = sizes_to_record(self)
        share = self.comm.rank, self.comm.size
        pages_a_row = -(-self.max_seq_len // self.config.page_size)
        nccl = self._sums_by_nccl(max([*decode[:1], *steps[:1]], default=0))
        return graph_memory(self.model_config, share, self.dtype.itemsize, pages_a_row, decode, steps, nccl)

    def _sums_by_nccl(self, tokens: int) -> bool:
        """In a step of so many."""
        like = torch.empty(tokens, self.model_config.hidden_size, dtype=self.dtype, device="meta")
        return isinstance(self.comm, DistributedCommunicator) and self.comm.by_nccl(like)

    def prepare_to_run(self) -> None:
        self.graphs: GraphRunner | None = None
        self.step_graphs: StepGraphs | None = None
        if reason := why_no_graphs(self):
            log.info(reason)
        else:
            _record_graphs(self)

    def pad(self, batch: Batch) -> None:
        for graphs in (self.graphs, self.step_graphs):
            if graphs is not None:
                graphs.pad(batch)

    def run_model(self, batch: Batch) -> Tensor:
        for graphs in (self.graphs, self.step_graphs):
            if graphs is not None and graphs.can_run(batch):
                return graphs.replay(batch)
        return super().run_model(batch)


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes to record, descending: 1, 2, 4, multiples of 8, and the largest itself."""
    return sorted((size for size in {1, 2, 4, *range(8, largest, 8), largest} if size <= largest), reverse=True)


def why_no_graphs(engine: GraphEngine) -> str | None:
    """Why steps are launched kernel by kernel, for the log. None: they need not be."""
    if _largest_size(engine) == 0:
        return "CUDA graphs: off"
    if engine.device.type != "cuda":
        return f"CUDA graphs need CUDA: on the {engine.device.type} every step is launched kernel by kernel"
    if not isinstance(engine.attention, GraphAttention):
        return "CUDA graphs: the attention backend cannot be recorded, every step is launched kernel by kernel"
    if waits_for_host(engine.model):
        return "CUDA graphs: experts wait for the host to count their tokens, every step is launched kernel by kernel"
    return None


def sizes_to_record(engine: GraphEngine) -> tuple[list[int], list[int]]:
    """Rows of decode steps, and tokens of steps with prompts, both descending."""
    if why_no_graphs(engine):
        return [], []
    return graph_sizes(_largest_size(engine)), step_sizes(engine, engine.config.cuda_graph_max_prefill)


def _record_graphs(engine: GraphEngine) -> None:
    largest, counted = _largest_size(engine), engine.graph_memory()
    sizes = graph_sizes(largest)
    free, make_graph = free_memory(engine.device), CudaGraphMaker(engine.device)
    assert isinstance(engine.attention, GraphAttention)  # why_no_graphs
    engine.graphs = GraphRunner(engine, engine.attention, sizes, make_graph)
    engine.step_graphs = record_steps(engine, engine.config.cuda_graph_max_prefill, largest, make_graph)
    used = free - free_memory(engine.device)
    log.info("CUDA graphs: %.2f GiB (%s)", used / 2**30, counted)
    if used > counted.total:
        log.warning("CUDA graphs took more than was counted: if memory runs out, lower --memory-ratio")


def _largest_size(engine: GraphEngine) -> int:
    wanted = engine.config.cuda_graph_max_bs
    if wanted is None and engine.device.type == "cuda":
        memory = torch.cuda.get_device_properties(engine.device).total_memory
        wanted = 256 if memory > 80 * 2**30 else 160
    return min(engine.config.max_running_requests, 256 if wanted is None else wanted)


class CudaGraphMaker:
    """Graphs that share one memory pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def __call__(self, run: Replay) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # once outside: libraries make their workspaces at their first call
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        return graph.replay
