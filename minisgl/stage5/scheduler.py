"""Decides what runs next, and takes in what came out. Knows nothing of processes, streams or text.

The calls of one step, in this order: schedule, forward, commit. Lengths advance in `schedule`, values arrive in
`commit`; so the next `schedule` may come before this `commit`, which is all that overlap (stage 7) does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core.batch import Batch, ForwardInput, ForwardOutput
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import ChunkedReq, Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.kernel.device import to_device
from minisgl.stage3.engine import Engine
from minisgl.stage4.cache_manager import CacheManager
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.decode import DecodeManager
from minisgl.stage5.prefill import PendingReq, PrefillManager
from minisgl.stage5.table import TableManager


class Scheduler:
    def __init__(self, config: SchedulerConfig, engine: Engine, eos_ids: frozenset[int], tracer: Tracer) -> None:
        self.config, self.engine, self.eos_ids, self.tracer = config, engine, eos_ids, tracer
        self.cache = CacheManager(engine.table, engine.pool.num_pages, config.cache, tracer)
        self.tables = TableManager(config.max_running_requests, engine.max_seq_len, engine.device)
        self.prefill = PrefillManager(self.cache, self.tables)
        self.decode = DecodeManager(config.page_size)
        self.step = 0
        self.in_flight = 0  # batches scheduled and not yet committed

    @property
    def has_work(self) -> bool:
        """Something waits, runs, or is in flight without its last token."""
        return bool(self.prefill.pending or self.decode.running)

    def add(self, uid: int, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue a request that `check_prompt` and `check_fits` have found good."""
        self.tracer.begin("queued", uid)
        self.prefill.add(PendingReq(uid, torch.tensor(prompt_ids, dtype=torch.int32), params))

    def abort(self, uid: int) -> list[TokenOutput]:
        """End a request wherever it stands: its terminal output, or nothing if it has ended already."""
        pending = self.prefill.remove(uid)
        req = pending.chunk if pending else self.decode.running.pop(uid, None)
        if pending is None and req is None:
            return []
        if req is None:
            self.tracer.end("queued", uid)
            return [TokenOutput(uid, None, "abort", 0)]
        req.finish_reason = "abort"
        self._release_if_idle(req)
        return [TokenOutput(uid, None, "abort", req.cached_tokens)]

    def schedule(self) -> ForwardInput | None:
        """The next batch, ready to be launched. None when nothing can run now."""
        batch = self._choose_batch()
        return self._prepare(batch) if batch else None

    @torch.inference_mode()
    def forward(self, forward_input: ForwardInput) -> ForwardOutput:
        """Launch: ids from the token pool, the model, sampled tokens back to the pool. All of it on the device."""
        batch, sampling_args, input_tuple, write_tuple = forward_input
        batch.input_ids = self.tables.token_pool[input_tuple]  # [tokens]
        output = self.engine.forward_batch(batch, sampling_args)
        self.tables.token_pool[write_tuple] = output.next_tokens  # [reqs]
        return output

    def commit(self, forward_input: ForwardInput, output: ForwardOutput) -> list[TokenOutput]:
        """Wait for the sampled tokens, and do all that depends on their values: append, finish, cache, free."""
        output.copy_done.synchronize()
        self.in_flight -= 1
        token_ids = output.next_tokens_host.tolist()
        with self.cache.freeing():
            outputs = [self._commit(*pair) for pair in zip(forward_input.batch.reqs, token_ids, strict=True)]
        return [output for output in outputs if output is not None]

    def _choose_batch(self) -> Batch | None:
        """Prefill first: whoever waits joins as soon as there is room. Else everyone who decodes."""
        reqs = self.prefill.schedule(self.config.max_prefill_length, self.decode.reserved_pages())
        if reqs:
            self.decode.add([req for req in reqs if not isinstance(req, ChunkedReq)])
            return Batch(reqs)
        reqs = self.decode.runnable()
        return Batch(reqs, num_decode=len(reqs)) if reqs else None

    def _prepare(self, batch: Batch) -> ForwardInput:
        self.step += 1
        self.in_flight += 1
        with self.tracer.span("schedule", "scheduler", step=self.step, phase=batch.phase, requests=batch.size):
            self.engine.pad(batch)
            self.cache.allocate(batch.reqs)
            input_tuple = self.engine.prepare(batch)
            write_tuple = self._write_tuple(batch)
            sampling_args = self.engine.sampler.prepare(batch.reqs)
            for req in batch.reqs:
                self._trace_launch(req)
                req.complete_one()
                req.in_flight += 1
        return ForwardInput(batch, sampling_args, input_tuple, write_tuple)

    def _write_tuple(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where each sampled token goes: after the request's last token, or nowhere (the dummy row) for a chunk
        and for the last token a request may have, which no step will read."""
        goes = [(req.table_idx, req.device_len) if req.can_decode else (self.tables.dummy_row, 0) for req in batch.reqs]
        rows, columns = to_device(torch.tensor(goes).T.contiguous(), self.engine.device)
        return rows, columns

    def _commit(self, req: Req, token_id: int) -> TokenOutput | None:
        """One request of a batch that is done. A request that ended while it was in flight is only released."""
        req.in_flight -= 1
        if req.finish_reason is not None:
            self._release_if_idle(req)
            return None
        if isinstance(req, ChunkedReq):
            return None
        is_first = req.output_len == 0
        reason = req.append_host(token_id, self.eos_ids)
        if reason is not None:
            self.decode.remove(req)
            self._release_if_idle(req)
        elif is_first:
            self.cache.cache_req(req, finished=False)  # its prompt is there for whoever comes next
        return TokenOutput(req.uid, token_id, reason, req.cached_tokens)

    def _release_if_idle(self, req: Req) -> None:
        """Pages and row come back once, when no launched batch can still write to them."""
        if req.in_flight == 0:
            self.cache.cache_req(req, finished=True)
            self.tables.free(req.table_idx)
            self.tracer.end("running", req.uid)

    def _trace_launch(self, req: Req) -> None:
        if self.tracer.enabled and req.output_len == 0 and req.cached_len == req.cached_tokens:
            self.tracer.end("queued", req.uid)
            self.tracer.begin("running", req.uid, cached_tokens=req.cached_tokens)

    def check_integrity(self) -> None:
        """Pages and rows add up. For tests and idle moments; raises AssertionError."""
        pending = [pending.chunk for pending in self.prefill.pending if pending.chunk]
        self.cache.check_integrity([*pending, *self.decode.running.values()])

    def stats(self) -> dict[str, int]:
        return {**self.cache.stats(), "rows_free": self.tables.num_free}
