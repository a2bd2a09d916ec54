"""The requests that wait, and which of their tokens come next. Knows nothing of decode but what it was promised."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.core.req import ChunkedReq, Req
from minisgl.learn import exercise
from minisgl.stage4.cache_manager import CacheManager
from minisgl.stage5.admission import FullReservation
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.policies import SchedulePolicy
from minisgl.stage5.table import TableManager


class PrefillManager:
    def __init__(
        self, cache: CacheManager, tables: TableManager, admission: FullReservation, policy: SchedulePolicy
    ) -> None:
        self.cache, self.tables, self.admission, self.policy = cache, tables, admission, policy
        self.pending: OrderedDict[int, PendingReq] = OrderedDict()  # by uid; see SchedulePolicy.order
        self._arrived = 0

    @property
    def half_done(self) -> ChunkedReq | None:
        """The prompt that has a row and pages, and waits with its next chunk. There is never more than one."""
        head = next(iter(self.pending.values()), None)
        return head.chunk if head else None

    @property
    def has_turn(self) -> bool:
        """Somebody waits who has a row, or could be given one."""
        return bool(self.pending) and (self.tables.num_free > 0 or self.half_done is not None)

    def add(self, pending: PendingReq) -> None:
        pending.number = self._arrived
        self._arrived += 1
        self.pending[pending.uid] = pending

    def put_back(self, pending: PendingReq) -> None:
        """Before all others, but for a half-done prompt: a request that was retracted, or is half-done itself."""
        half_done = self.half_done
        self.pending[pending.uid] = pending
        self.pending.move_to_end(pending.uid, last=False)
        if half_done and half_done.uid != pending.uid:
            self.pending.move_to_end(half_done.uid, last=False)

    def remove(self, uid: int) -> PendingReq | None:
        """Take a request out of the queue. None when it is not in it."""
        return self.pending.pop(uid, None)

    def schedule(self, token_budget: int, promised_pages: int) -> list[Req]:
        """Requests, in the policy's order, whose next tokens fit the budget. A prompt that does not fit whole gives a
        chunk, which uses the budget up; it is the first of the next step. promised_pages: to those that run."""
        adder = PrefillAdder(self.cache, self.tables, self.admission, token_budget, promised_pages)
        reqs: list[Req] = []
        for pending in self.policy.order(self.pending.values(), self._arrived - len(self.pending)):
            req = adder.add(pending)
            if req is None:
                break
            reqs.append(req)
            pending.chunk = req if isinstance(req, ChunkedReq) else None
        for req in reqs:
            pending = self.pending.pop(req.uid)
            if pending.chunk:
                self.put_back(pending)
        return reqs


class PrefillAdder:
    """Admission for one batch: what is left of the token budget, and of the pages that nobody was promised."""

    def __init__(
        self,
        cache: CacheManager,
        tables: TableManager,
        admission: FullReservation,
        token_budget: int,
        promised_pages: int,
    ) -> None:
        self.cache, self.tables, self.admission = cache, tables, admission
        self.token_budget = token_budget
        self.promised_pages = promised_pages

    def add(self, pending: PendingReq) -> Req | None:
        """The request's next tokens as a Req, its row and prefix in place; None when it must wait."""
        chunk = pending.chunk
        if self.token_budget == 0 or (chunk and chunk.retracted):
            return None
        if chunk is None:
            return self._admit(pending)
        req = self._cut(pending, chunk.table_idx, chunk.cached_len, chunk.cache_handle)
        req.cached_tokens = chunk.cached_tokens
        req.prompt_logprobs = chunk.prompt_logprobs  # one list: chunks still in flight add to it, in order
        return req

    def _admit(self, pending: PendingReq) -> Req | None:
        """The next tokens of a request that enters, in a row that begins with its cached prefix. None: it must wait."""
        if self.tables.num_free == 0:
            return None
        # Tokens found in the cache are not computed, and have no logits.
        handle = self._find_room(pending, pending.input_ids[:0] if pending.reports_prompt else pending.input_ids)
        if handle is None:
            return None
        row = self.tables.allocate()
        self.tables.write_prompt(row, pending.input_ids)
        self.cache.table.set_prefix(row, handle.slots())
        self.cache.tracer.end(pending.state, pending.uid)
        self.cache.tracer.begin("prefill", pending.uid, cached_tokens=handle.cached_len)
        req = self._cut(pending, row, handle.cached_len, handle)
        if pending.cached_tokens is not None:  # it is back after a retraction
            req.cached_tokens = pending.cached_tokens
        return req

    @exercise("5.1")
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

    @exercise("5.2")
    def _cut(self, pending: PendingReq, row: int, cached_len: int, handle: CacheHandle) -> Req:
        """As many of its tokens as the budget allows, from cached_len on: a Req if they are its last, else a
        ChunkedReq. Lowers the budget by what it computes, and adds its pages to come to those that are promised."""
        end = min(cached_len + self.token_budget, len(pending.input_ids))
        args = (pending.uid, pending.input_ids, pending.sampling_params, row, cached_len, handle, pending.prompt_len)
        req = Req(*args) if end == len(pending.input_ids) else ChunkedReq(*args, chunk_end=end)
        self.token_budget -= req.extend_len
        self.promised_pages += self.admission.pages_to_come(req)
        return req
