"""Stage 5, scheduler: the package's own methods. Knows no other way.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

from __future__ import annotations

from operator import attrgetter

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
    # 5.1 find room for a request
    def _find_room(self, pending: PendingReq, ids: Tensor) -> CacheHandle | None:
        """A request enters only if the pages it is promised are there, beside those that others were promised. Returns
        the longest cached prefix of ids (int32, on the host), locked; or None, and nothing is locked."""
        handle = self.cache.match_req(ids)
        self.cache.lock(handle)  # before counting: what it matched can no longer be evicted for others
        needed = self.admission.pages(handle.cached_len, pending.prompt_len, len(pending.input_ids), pending.max_len)
        if needed + self.promised_pages > self.cache.available_pages:
            self.cache.unlock(handle)
            return None
        return handle

    # 5.2 cut to the budget
    def _cut(self, pending: PendingReq, row: int, cached_len: int, handle: CacheHandle) -> Req:
        """As many of its tokens as the budget allows, from cached_len on: a Req if they are its last, else a
        ChunkedReq. Lowers the budget by what it computes, and adds its pages to come to those that are promised."""
        end = min(cached_len + self.token_budget, len(pending.input_ids))
        args = (pending.uid, pending.input_ids, pending.sampling_params, row, cached_len, handle, pending.prompt_len)
        req = Req(*args) if end == len(pending.input_ids) else ChunkedReq(*args, chunk_end=end)
        self.token_budget -= req.extend_len
        self.promised_pages += self.admission.pages_to_come(req)
        return req


class MyMixed(Mixed):
    # 5.2 cut to the budget
    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        """Decode rows first, a token each, then prompts, as many of their tokens as the budget has left."""
        running = decode()
        return Batch(running + prefill(token_budget - len(running)), num_decode=len(running))


class MyDecodeManager(DecodeManager):
    # 5.3 who decodes in this step
    def runnable(self) -> list[Req]:
        """Everyone with a token left to compute, by uid: an order that is the same on every rank."""
        return sorted([req for req in self.running.values() if not req.is_leaving], key=attrgetter("uid"))

    def schedule(self, pages: int) -> list[Req]:
        """Everyone who can run in this step. When there are fewer pages than are wanted, the first to come get them:
        the others wait for a batch in flight to give some back."""
        reqs = self.runnable()
        if len(reqs) <= pages:  # nobody takes more than one
            return reqs
        chosen = []
        for req in reqs:
            needed = new_pages(req.cached_len, req.device_len, self.admission.page_size)
            if needed <= pages:
                pages -= needed
                chosen.append(req)
        return chosen


class MyScheduler(Scheduler):
    # 5.4 commit what was sampled
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

    # 5.5 make room by retraction
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
