"""Stage 7, overlap: the package's own methods. Knows no other way.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

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
    @staticmethod
    def overlap_loop(scheduler: Scheduler, inbox: Inbox, stream: EngineStream) -> Steps:
        """schedule N, launch N, commit N - 1: the host works on the steps around the one that the device computes.

        N is scheduled before the tokens of N - 1 are known, so a request that they end is computed once more for
        nothing.
        """
        last: InFlight | None = None
        while (orders := inbox.receive(blocking=last is None and not scheduler.has_work)) is not None:
            outputs = carry_out(scheduler, orders)
            forward_input = scheduler.schedule()
            launched = launch(scheduler, stream, forward_input) if forward_input is not None else None
            if last is not None:
                outputs += commit(scheduler, last)
            elif launched is None and scheduler.has_work:
                raise RuntimeError("requests wait, nothing runs, and none can be admitted: this is a bug")
            last = launched
            yield outputs


class MyScheduler(Scheduler):
    # 7.2 where a sampled token goes
    def _write_tuple(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where each sampled token goes, (rows, positions), int64 [reqs] each: after the request's last token, or
        nowhere (the dummy row) for a chunk, which has none. The lengths have not advanced yet."""
        goes = [(req.table_idx, req.device_len) if req.can_decode else (self.tables.dummy_row, 0) for req in batch.reqs]
        host = torch.from_numpy(np.array(goes, dtype=np.int64).T.copy())  # [2, reqs]
        rows, columns = to_device(host, self.engine.device).unbind()
        return rows, columns

    # 7.3 when a row may be reused
    def abort(self, uid: int) -> list[TokenOutput]:
        """End a request wherever it stands: its terminal output, or nothing if it has ended already."""
        pending = self.prefill.remove(uid)
        req = pending.chunk if pending else self.decode.running.pop(uid, None)
        if req is not None:
            req.finish_reason = "abort"
            self._release_if_idle(req)
            return [TokenOutput(uid, None, "abort", req.cached_tokens)]
        if pending is not None:
            self.tracer.end(pending.state, uid)
            return [TokenOutput(uid, None, "abort", pending.cached_tokens or 0)]
        return []

    def _release_if_idle(self, req: Req) -> None:
        """Pages and row come back once, when no launched batch can still write to them."""
        if req.in_flight == 0:
            self.cache.cache_req(req, finished=True)
            self.tables.free(req.table_idx)
            self.tracer.end("prefill" if isinstance(req, ChunkedReq) else "decode", req.uid)


class MyGraphRunner(GraphRunner):
    # 7.4 pad to a graph
    def pad(self, batch: Batch) -> None:
        """Up to the next recorded size, if the batch is one that a graph can run."""
        sizes = [size for size in self._sizes if size >= batch.size]
        if batch.phase == "decode" and sizes:
            batch.padded_reqs = batch.reqs + [self._dummy_req] * (sizes[-1] - batch.size)

    def can_run(self, batch: Batch) -> bool:
        """Whether it is a decode step of a recorded size, the padding included."""
        return batch.phase == "decode" and batch.padded_size in self._replays

    # 7.5 replay a graph
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
