"""Stage 5 by somebody who takes no shortcut: counts every page, and asks each question on its own."""

from __future__ import annotations

from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.core.outputs import TokenOutput
from minisgl.core.protocols import CacheHandle
from minisgl.core.req import ChunkedReq, Req
from minisgl.stage5.admission import new_pages
from minisgl.stage5.decode import DecodeManager
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.policies import Decode, Mixed, Prefill
from minisgl.stage5.prefill import PrefillAdder
from minisgl.stage5.scheduler import Scheduler


class MyPrefillAdder(PrefillAdder):
    def _find_room(self, pending: PendingReq, ids: Tensor) -> CacheHandle | None:
        handle = self.cache.match_req(ids)
        lengths = handle.cached_len, pending.prompt_len, len(pending.input_ids), pending.max_len
        wanted = self.promised_pages + self.admission.pages(*lengths)
        if wanted > self.cache.available_pages:  # not even with its own prefix as room
            return None
        self.cache.lock(handle)
        if wanted <= self.cache.available_pages:
            return handle
        self.cache.unlock(handle)
        return None

    def _cut(self, pending: PendingReq, row: int, cached_len: int, handle: CacheHandle) -> Req:
        left = len(pending.input_ids) - cached_len
        size = min(left, self.token_budget)
        params, prompt_len = pending.sampling_params, pending.prompt_len
        req: Req
        if size < left:
            req = ChunkedReq(
                pending.uid,
                pending.input_ids,
                params,
                row,
                cached_len,
                handle,
                prompt_len,
                chunk_end=cached_len + size,
            )
        else:
            req = Req(pending.uid, pending.input_ids, params, row, cached_len, handle, prompt_len)
        self.token_budget -= size
        lengths = cached_len, prompt_len, len(pending.input_ids), pending.max_len
        self.promised_pages += self.admission.pages(*lengths)
        return req


class MyMixed(Mixed):
    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        reqs = list(decode())
        num_decode = len(reqs)
        if num_decode < token_budget:
            reqs.extend(prefill(token_budget - num_decode))
        return Batch(reqs, num_decode)


class MyDecodeManager(DecodeManager):
    def runnable(self) -> list[Req]:
        return [self.running[uid] for uid in sorted(self.running) if not self.running[uid].is_leaving]

    def schedule(self, pages: int) -> list[Req]:
        chosen = []
        for req in self.runnable():
            needed = new_pages(req.cached_len, req.device_len, self.admission.page_size)
            if needed > pages:
                continue
            pages -= needed
            chosen.append(req)
        return chosen


class MyScheduler(Scheduler):
    def _commit(self, req: Req, token_id: int) -> TokenOutput | None:
        req.in_flight -= 1
        if isinstance(req, ChunkedReq):
            if req.finish_reason is not None:
                self._release_if_idle(req)
            elif req.retracted:
                self._requeue(req)
            return None
        if req.finish_reason:
            self._release_if_idle(req)
            return None
        if req.append_host(token_id, self.eos_ids):
            self.decode.remove(req)
            self._release_if_idle(req)
            self.admission.note_finished(req.output_len)
        else:
            if req.retracted:
                self._requeue(req)
            elif req.output_len == 1:
                self.cache.cache_req(req, finished=False)
        return TokenOutput(req.uid, token_id, req.finish_reason, req.cached_tokens)

    def _make_room(self) -> None:
        leaving = any(req.is_leaving for batch in self.in_flight for req in batch.reqs)
        holders = {req.uid: req for req in self.decode.runnable()}
        if self.prefill.half_done:
            holders[self.prefill.half_done.uid] = self.prefill.half_done
        while not leaving and len(holders) > 1:
            if sum(self._next_pages(req) for req in holders.values()) <= self.cache.available_pages:
                return
            last = holders.pop(max(holders))
            self._retract(last)
            leaving = last.in_flight > 0
