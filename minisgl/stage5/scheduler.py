"""Decides what runs next, and takes in what came out. Knows nothing of processes, streams or text.

The calls of one step, in this order: schedule, forward, commit. Lengths advance in `schedule`, values arrive in
`commit`; so the next `schedule` may come before this `commit`, which is all that overlap (stage 7) does.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.core.batch import Batch, ForwardInput, ForwardOutput
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import ChunkedReq, Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.kernel.device import prefill_length, to_device
from minisgl.kernel.device_lane import device_lane
from minisgl.learn import exercise
from minisgl.stage3.engine import Engine
from minisgl.stage3.page_count import check_fits
from minisgl.stage4.cache_manager import CacheManager
from minisgl.stage5.admission import create_admission, new_pages
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.decode import DecodeManager
from minisgl.stage5.logprobs import attach_logprobs
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.policies import CreatePolicy, create_policy
from minisgl.stage5.prefill import PrefillManager
from minisgl.stage5.table import TableManager

log = logging.getLogger("minisgl")


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        engine: Engine,
        eos_ids: frozenset[int],
        tracer: Tracer,
        create_policy: CreatePolicy = create_policy,
    ) -> None:
        self.config, self.engine, self.eos_ids, self.tracer = config, engine, eos_ids, tracer
        self.cache = CacheManager(engine.table, engine.pool.num_pages, config.cache, tracer)
        self.tables = TableManager(config.max_running_requests, engine.max_seq_len, engine.device)
        self.admission = create_admission(config)
        self.policy = create_policy(config, lambda ids: self.cache.match_req(ids).cached_len)
        self.prefill = PrefillManager(self.cache, self.tables, self.admission, self.policy)
        self.decode = DecodeManager(self.admission)
        self.device_lane = device_lane(tracer, engine.device)
        self.token_budget = config.max_prefill_length or prefill_length(engine.device)
        log.info("scheduler: %s, at most %d tokens a step", config.schedule_policy, self.token_budget)
        self.step = 0
        self.retractions = 0
        self.in_flight: list[Batch] = []  # scheduled and not yet committed

    @property
    def has_work(self) -> bool:
        """Something waits, runs, or is in flight without its last token."""
        return bool(self.prefill.pending or self.decode.running)

    def add(self, uid: int, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue a request that `check_prompt` has found good. Raises ValueError when the pool could never hold it: it
        would wait for ever, and all others behind it."""
        check_fits(len(prompt_ids), params, self.config.page_size, self.cache.num_pages)
        self.tracer.begin("queued", uid)
        input_ids = torch.from_numpy(np.array(prompt_ids, dtype=np.int32))  # torch takes three times as long for a list
        self.prefill.add(PendingReq(uid, input_ids, len(prompt_ids), params))

    @exercise("7.3")
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

    def schedule(self) -> ForwardInput | None:
        """The next batch, ready to be launched. None when nothing can run now."""
        self._make_room()
        batch = self.policy.compose(self.token_budget, self._next_prompts, self._next_tokens)
        return self._prepare(batch) if batch.reqs else None

    @torch.inference_mode()
    def forward(self, forward_input: ForwardInput) -> ForwardOutput:
        """Launch: ids from the token pool, the model, sampled tokens back to the pool. All of it on the device."""
        batch, sampling_args, input_tuple, write_tuple = forward_input
        with self.device_lane.step(self.step, batch):
            batch.input_ids = self.tables.token_pool[input_tuple]  # [tokens]
            output = self.engine.forward_batch(batch, sampling_args)
            self.tables.token_pool[write_tuple] = output.next_tokens  # [reqs]
        return output

    def commit(self, forward_input: ForwardInput, output: ForwardOutput) -> list[TokenOutput]:
        """Wait for the sampled tokens, and do all that depends on their values: append, finish, cache, free."""
        output.copy_done.synchronize()
        with self.tracer.span("commit", "scheduler"):
            self.device_lane.write()
            self.in_flight.remove(forward_input.batch)
            token_ids = output.next_tokens_host.tolist()
            self._trace_first_tokens(forward_input.batch)
            with self.cache.freeing():
                outputs = [self._commit(*pair) for pair in zip(forward_input.batch.reqs, token_ids, strict=True)]
            if output.logprobs is not None:
                attach_logprobs(forward_input.batch.reqs, outputs, output.logprobs)
            return [output for output in outputs if output is not None]

    def _next_prompts(self, token_budget: int) -> list[Req]:
        if token_budget <= 0 or not self.prefill.has_turn:
            return []
        reqs = self.prefill.schedule(token_budget, self.decode.pages_promised())
        self.decode.add([req for req in reqs if not isinstance(req, ChunkedReq)])
        return reqs

    def _next_tokens(self) -> list[Req]:
        return self.decode.schedule(self._pages_for_decode())

    def _pages_for_decode(self) -> int:
        """All there are, but for those that a half-done prompt was promised for the rest of it."""
        half_done = self.prefill.half_done
        return self.cache.available_pages - (self._next_pages(half_done) if half_done else 0)

    def _next_pages(self, req: Req) -> int:
        """Pages without which its next token cannot be sampled."""
        return 0 if req.is_leaving else new_pages(req.cached_len, req.next_len, self.config.page_size)

    @exercise("5.5")
    def _make_room(self) -> None:
        """Retract who came last, until the others have their next pages: the first to come always gets on, since
        alone it fits. But wait, and retract nobody, while a batch in flight has pages that will come back with it."""
        if self._pages_for_decode() >= len(self.decode.running):  # nobody takes more than one
            return
        half_done = self.prefill.half_done
        holders = sorted([*self.decode.runnable(), *([half_done] if half_done else [])], key=lambda req: req.uid)
        while len(holders) > 1 and sum(map(self._next_pages, holders)) > self.cache.available_pages:
            if any(req.is_leaving for batch in self.in_flight for req in batch.reqs):
                return
            self._retract(holders.pop())

    def _retract(self, req: Req) -> None:
        """Back to the queue, with the tokens it has. One that is in flight goes after its batch, whose token it keeps
        (and if that is its last, it has simply ended)."""
        self.retractions += 1
        req.retracted = True
        if req.in_flight == 0:
            self._requeue(req)

    def _requeue(self, req: Req) -> None:
        self._release_if_idle(req)
        self.tracer.begin("retracted", req.uid, output_tokens=req.output_len)
        self.decode.running.pop(req.uid, None)  # a half-done prompt is not in it
        self.prefill.put_back(PendingReq.retracted(req))

    def _prepare(self, batch: Batch) -> ForwardInput:
        self.step += 1
        self.in_flight.append(batch)
        self.engine.pad(batch)
        with self.tracer.span("schedule", "scheduler", step=self.step, **self._facts(batch)):
            self.cache.allocate(batch.reqs)
            input_tuple = self.engine.prepare(batch)
            write_tuple = self._write_tuple(batch)
            sampling_args = self.engine.sampler.prepare(batch.reqs, self.eos_ids, self.tables.token_pool)
            for req in batch.reqs:
                req.complete_one()
                req.in_flight += 1
        return ForwardInput(batch, sampling_args, input_tuple, write_tuple)

    def _facts(self, batch: Batch) -> dict[str, Any]:
        """What a figure needs to know of a step, before its lengths advance."""
        if not self.tracer.enabled:
            return {}
        tokens = sum(req.extend_len for req in batch.reqs)
        sizes = {"requests": batch.size, "decode": batch.num_decode, "padded": batch.padded_size}
        return {"phase": batch.phase, "tokens": tokens, **sizes}

    @exercise("7.2")
    def _write_tuple(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where each sampled token goes, (rows, positions), int64 [reqs] each: after the request's last token, or
        nowhere (the dummy row) for a chunk, which has none. The lengths have not advanced yet."""
        goes = [(req.table_idx, req.device_len) if req.can_decode else (self.tables.dummy_row, 0) for req in batch.reqs]
        host = torch.from_numpy(np.array(goes, dtype=np.int64).T.copy())  # [2, reqs]
        rows, columns = to_device(host, self.engine.device).unbind()
        return rows, columns

    @exercise("5.4")
    def _commit(self, req: Req, token_id: int) -> TokenOutput | None:
        """One request of a batch that is done. A request that ended while it was in flight is only released."""
        req.in_flight -= 1
        if req.finish_reason is not None:
            self._release_if_idle(req)
            return None
        if isinstance(req, ChunkedReq):
            if req.retracted:
                self._requeue(req)
            return None
        reason = req.append_host(token_id, self.eos_ids)
        if reason is not None:
            self.decode.remove(req)
            self.admission.note_finished(req.output_len)
            self._release_if_idle(req)
        elif req.retracted:
            self._requeue(req)
        elif req.output_len == 1:
            self.cache.cache_req(req, finished=False)  # its prompt is there for whoever comes next
        return TokenOutput(req.uid, token_id, reason, req.cached_tokens)

    @exercise("7.3")
    def _release_if_idle(self, req: Req) -> None:
        """Pages and row come back once, when no launched batch can still write to them."""
        if req.in_flight == 0:
            self.cache.cache_req(req, finished=True)
            self.tables.free(req.table_idx)
            self.tracer.end("prefill" if isinstance(req, ChunkedReq) else "decode", req.uid)

    def _trace_first_tokens(self, batch: Batch) -> None:
        if self.tracer.enabled:
            for req in batch.reqs[batch.num_decode :]:
                if not isinstance(req, ChunkedReq):
                    self.tracer.phase("prefill", "decode", req.uid)

    def flush_cache(self) -> None:
        """Forget every cached prefix that no request holds."""
        self.cache.flush()

    def check_integrity(self) -> None:
        """Pages and rows add up. For tests and idle moments; raises AssertionError."""
        held = {req.uid: req for batch in self.in_flight for req in batch.reqs} | self.decode.running
        if half_done := self.prefill.half_done:
            held[half_done.uid] = half_done
        self.cache.check_integrity(list(held.values()))
        if len(held) + self.tables.num_free != self.tables.num_rows:
            raise AssertionError(f"{len(held)} rows held and {self.tables.num_free} free, of {self.tables.num_rows}")

    def stats(self) -> dict[str, int]:
        return {**self.cache.stats(), "rows_free": self.tables.num_free, "retractions": self.retractions}
