"""Stage 7, overlap: your code.

`minisgl start 7` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check 7` says how you stand, `minisgl hint 7.1` helps.
A method may use the rest of its class, and what is imported here; what it needs of both is listed above it. Methods
that you add beside it are yours too.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

# ruff: noqa: F401 (imports for the answers)
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import ChunkedReq, Req
from minisgl.kernel.device import to_device
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.inbox import Inbox, carry_out
from minisgl.stage7.graph_runner import GraphRunner
from minisgl.stage7.llm import LLM, Steps
from minisgl.stage7.overlap import InFlight, commit, launch
from minisgl.stage7.streams import EngineStream


class MyLLM(LLM):
    # 7.1 the order of the overlap loop
    #   inbox.receive(blocking=) -> list of orders, perhaps empty; None: end the loop
    #   carry_out(scheduler, orders) -> list[TokenOutput]   adds requests and aborts some: the outputs of those
    #   scheduler.schedule() -> ForwardInput or None; scheduler.has_work   something waits, or runs
    #   launch(scheduler, stream, forward_input) -> InFlight   returns at once
    #   commit(scheduler, in_flight) -> list[TokenOutput]   waits for that step
    @staticmethod
    def overlap_loop(scheduler: Scheduler, inbox: Inbox, stream: EngineStream) -> Steps:
        """schedule N, launch N, commit N - 1: the host works on the steps around the one that the device computes.

        N is scheduled before the tokens of N - 1 are known, so a request that they end is computed once more for
        nothing.
        """
        raise NotImplementedError("exercise 7.1")


class MyScheduler(Scheduler):
    # 7.2 where a sampled token goes
    #   batch.reqs   of each: req.table_idx (its row), req.device_len (tokens, those computed in this step included),
    #       req.can_decode (false for a chunk)
    #   self.tables.dummy_row   the row that nobody reads; self.engine.device
    #   to_device(tensor, device)   a copy from the host that nobody waits for
    def _write_tuple(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where each sampled token goes, (rows, positions), int64 [reqs] each: after the request's last token, or
        nowhere (the dummy row) for a chunk, which has none. The lengths have not advanced yet."""
        raise NotImplementedError("exercise 7.2")

    # 7.3 when a row may be reused
    #   self.prefill.remove(uid) -> PendingReq or None   out of the queue; pending.chunk: a Req or None, the half-done
    #       prompt, whose row it holds; pending.cached_tokens: int or None; pending.state: what the trace calls it while
    #       it waits
    #   self.decode.running   dict from uid to Req: those that run
    #   self.cache.cache_req(req, finished=True)   keeps what the tree can use, frees its other pages
    #   self.tables.free(row); self.tracer.end(state, uid)   the states of those with a row: "prefill" for a chunk,
    #       "decode"
    #   req.uid, req.table_idx (its row), req.in_flight (batches not committed), req.finish_reason, req.cached_tokens
    #   TokenOutput(uid, token_id, finish_reason, cached_tokens)   token_id is None for an abort
    #   self._release_if_idle(req)   your other half
    def abort(self, uid: int) -> list[TokenOutput]:
        """End a request wherever it stands: its terminal output, or nothing if it has ended already."""
        raise NotImplementedError("exercise 7.3")

    def _release_if_idle(self, req: Req) -> None:
        """Pages and row come back once, when no launched batch can still write to them."""
        raise NotImplementedError("exercise 7.3")


class MyGraphRunner(GraphRunner):
    # 7.4 pad to a graph
    #   self._sizes       list[int], the largest first: those that are recorded
    #   self._replays     dict from a recorded size to what replays it
    #   self._dummy_req   the engine's dummy request
    #   batch.phase   "prefill", "decode" or "mixed"; batch.reqs, batch.size: the real ones; batch.padded_reqs,
    #       batch.padded_size: with dummies, and the real ones alone until you pad
    def pad(self, batch: Batch) -> None:
        """Up to the next recorded size, if the batch is one that a graph can run."""
        raise NotImplementedError("exercise 7.4")

    def can_run(self, batch: Batch) -> bool:
        """Whether it is a decode step of a recorded size, the padding included."""
        raise NotImplementedError("exercise 7.4")

    # 7.5 replay a graph
    #   self._input_ids, self._positions, self._out_loc   [largest size] each: what the graphs read, at addresses that
    #       stay
    #   self._hidden     [largest size, hidden]: what they write
    #   self._replays    dict from size to a function without arguments, which runs that graph
    #   self._attention.prepare_for_replay(batch)   the backend copies its own numbers; self._model.lm_head(hidden) ->
    #       logits
    #   batch.input_ids, batch.positions, batch.out_loc   [batch.padded_size] each; batch.size: without the dummies
    def replay(self, batch: Batch) -> Tensor:
        """Give the graph what the step reads, and run it. Logits [reqs, local_vocab], without the padding's.

        The head stands outside the graph: it is one kernel, and its output, the only large one of a step, then needs no
        memory of its own in each graph, nor a copy out of it.
        """
        raise NotImplementedError("exercise 7.5")
