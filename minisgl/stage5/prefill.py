"""The requests that wait, and which of their tokens come next. Knows nothing of decode but what it has reserved."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from minisgl.core.req import ChunkedReq, Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage3.page_count import max_pages
from minisgl.stage4.cache_manager import CacheManager
from minisgl.stage5.decode import pages_to_come
from minisgl.stage5.table import TableManager


@dataclass(eq=False)
class PendingReq:
    uid: int
    input_ids: Tensor  # int32 [prompt], on the host
    sampling_params: SamplingParams
    chunk: ChunkedReq | None = None  # the part of it that is computed, or in flight


class PrefillManager:
    def __init__(self, cache: CacheManager, tables: TableManager) -> None:
        self.cache = cache
        self.tables = tables
        self.pending: deque[PendingReq] = deque()

    def add(self, pending: PendingReq) -> None:
        self.pending.append(pending)

    def remove(self, uid: int) -> PendingReq | None:
        """Take a request out of the queue. None when it is not in it."""
        found = next((pending for pending in self.pending if pending.uid == uid), None)
        if found is not None:
            self.pending.remove(found)
        return found

    def schedule(self, token_budget: int, reserved_pages: int) -> list[Req]:
        """Requests, first come first served, whose next tokens fit the budget. A prompt that does not fit whole
        gives a chunk and stays at the head of the queue: there is never more than one half-done prompt."""
        adder = PrefillAdder(self.cache, self.tables, token_budget, reserved_pages)
        reqs: list[Req] = []
        while self.pending:
            req = adder.add(self.pending[0])
            if req is None:
                break
            reqs.append(req)
            if isinstance(req, ChunkedReq):
                self.pending[0].chunk = req
                break
            self.pending.popleft()
        return reqs


class PrefillAdder:
    """Admission for one batch: what is left of the token budget, and of the pages that nobody was promised."""

    def __init__(self, cache: CacheManager, tables: TableManager, token_budget: int, reserved_pages: int) -> None:
        self.cache = cache
        self.tables = tables
        self.token_budget = token_budget
        self.reserved_pages = reserved_pages
        self.page_size = cache.table.page_size

    def add(self, pending: PendingReq) -> Req | None:
        """The request's next tokens as a Req, its row and prefix in place; None when it must wait."""
        if self.token_budget == 0:
            return None
        if pending.chunk is not None:
            return self._cut(pending, pending.chunk.table_idx, pending.chunk.cached_len, pending.chunk)
        return self._admit(pending)

    def _admit(self, pending: PendingReq) -> Req | None:
        """Full reservation: a request enters only if all it may ever need is there, so it can never get stuck."""
        if self.tables.num_free == 0:
            return None
        handle = self.cache.match_req(pending.input_ids)
        self.cache.lock(handle)  # before counting: what it matched can no longer be evicted for others
        needed = max_pages(len(pending.input_ids), pending.sampling_params, self.page_size)
        needed -= handle.cached_len // self.page_size
        if needed + self.reserved_pages > self.cache.available_size // self.page_size:
            self.cache.unlock(handle)
            return None
        row = self.tables.allocate()
        self.tables.write_prompt(row, pending.input_ids)
        self.cache.table.set_prefix(row, handle.slots())
        first = Req(pending.uid, pending.input_ids, pending.sampling_params, row, handle.cached_len, handle)
        return self._cut(pending, row, handle.cached_len, first)

    def _cut(self, pending: PendingReq, row: int, cached_len: int, before: Req) -> Req:
        """As much of the prompt as the budget allows. `before` is the request as it stood until now."""
        take = min(self.token_budget, len(pending.input_ids) - cached_len)
        self.token_budget -= take
        end = cached_len + take
        args = (pending.uid, pending.input_ids, pending.sampling_params, row, cached_len, before.cache_handle)
        req = Req(*args) if end == len(pending.input_ids) else ChunkedReq(*args, chunk_end=end)
        req.cached_tokens = before.cached_tokens
        self.reserved_pages += pages_to_come(req, self.page_size)
        return req
