"""Each exercise of stage 7, spelt out: other words for the same, and nothing of the package's own."""

from __future__ import annotations

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
from minisgl.stage7.overlap import commit, launch
from minisgl.stage7.streams import EngineStream


class MyLLM(LLM):
    @staticmethod
    def overlap_loop(scheduler: Scheduler, inbox: Inbox, stream: EngineStream) -> Steps:
        last = None
        while True:
            nothing_to_do = last is None and not scheduler.has_work
            orders = inbox.receive(blocking=nothing_to_do)
            if orders is None:
                return
            outputs = carry_out(scheduler, orders)
            next_input = scheduler.schedule()
            now = None
            if next_input is not None:
                now = launch(scheduler, stream, next_input)
            if last is not None:
                outputs.extend(commit(scheduler, last))
            if last is None and now is None and scheduler.has_work:
                raise RuntimeError("nothing runs, and nothing ever will")
            last = now
            yield outputs


class MyScheduler(Scheduler):
    def _write_tuple(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows, positions = [], []
        for req in batch.reqs:
            if req.can_decode:
                rows.append(req.table_idx)
                positions.append(req.device_len)
            else:
                rows.append(self.tables.dummy_row)
                positions.append(0)
        both = to_device(torch.tensor([rows, positions], dtype=torch.int64), self.engine.device)
        return both[0], both[1]

    def abort(self, uid: int) -> list[TokenOutput]:
        pending = self.prefill.remove(uid)
        if pending is not None and pending.chunk is None:
            self.tracer.end(pending.state, uid)
            return [TokenOutput(uid, None, "abort", pending.cached_tokens or 0)]
        req = pending.chunk if pending is not None else self.decode.running.pop(uid, None)
        if req is None:
            return []
        req.finish_reason = "abort"
        self._release_if_idle(req)
        return [TokenOutput(uid, None, "abort", req.cached_tokens)]

    def _release_if_idle(self, req: Req) -> None:
        if req.in_flight > 0:
            return
        self.cache.cache_req(req, finished=True)
        self.tables.free(req.table_idx)
        if isinstance(req, ChunkedReq):
            self.tracer.end("prefill", req.uid)
        else:
            self.tracer.end("decode", req.uid)


class MyGraphRunner(GraphRunner):
    def pad(self, batch: Batch) -> None:
        if batch.phase != "decode":
            return
        size = min((size for size in self._sizes if size >= batch.size), default=None)
        if size is not None:
            batch.padded_reqs = [*batch.reqs, *[self._dummy_req] * (size - batch.size)]

    def can_run(self, batch: Batch) -> bool:
        if batch.phase != "decode":
            return False
        return len(batch.padded_reqs) in self._replays

    def replay(self, batch: Batch) -> Tensor:
        size = batch.padded_size
        for buffer, values in (
            (self._input_ids, batch.input_ids),
            (self._positions, batch.positions),
            (self._out_loc, batch.out_loc),
        ):
            buffer[:size].copy_(values)
        self._attention.prepare_for_replay(batch)
        replay = self._replays[size]
        replay()
        hidden = self._hidden.narrow(0, 0, batch.size)
        return self._model.lm_head(hidden)
