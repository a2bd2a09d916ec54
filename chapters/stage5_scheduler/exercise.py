"""Stage 5, scheduler: your code.

`minisgl start 5` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check 5` says how you stand, `minisgl hint 5.1` helps.
A method may use the rest of its class, and what is imported here; what it needs of both is listed above it. Methods
that you add beside it are yours too.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

# ruff: noqa: F401 (imports for the answers)
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
    #   self.cache.match_req(ids) -> handle   the longest prefix that is cached, not locked; handle.cached_len
    #   self.cache.lock(handle), self.cache.unlock(handle), self.cache.available_pages   free ones and those that can be
    #       evicted
    #   self.admission.pages(cached_len, prompt_len, next_len, max_len)   pages to promise beyond those of cached_len
    #       tokens
    #   self.promised_pages   int: what others were promised and do not have yet
    #   pending.prompt_len, pending.max_len (prompt and longest answer), pending.input_ids (what it has now: next_len of
    #       them)
    def _find_room(self, pending: PendingReq, ids: Tensor) -> CacheHandle | None:
        """A request enters only if the pages it is promised are there, beside those that others were promised. Returns
        the longest cached prefix of ids (int32, on the host), locked; or None, and nothing is locked."""
        raise NotImplementedError("exercise 5.1")

    # 5.2 cut to the budget
    #   self.token_budget     int: what is left of the step's
    #   self.promised_pages   int; self.admission.pages_to_come(req) -> int: what req will want beyond what it has
    #   pending.uid, .input_ids (int32 [n], on the host), .sampling_params, .prompt_len
    #   Req(uid, input_ids, sampling_params, table_idx, cached_len, cache_handle, prompt_len)   table_idx: its row
    #   ChunkedReq(the same, chunk_end=)   input_ids stays whole; chunk_end: where this chunk ends; req.extend_len: its
    #       tokens
    def _cut(self, pending: PendingReq, row: int, cached_len: int, handle: CacheHandle) -> Req:
        """As many of its tokens as the budget allows, from cached_len on: a Req if they are its last, else a
        ChunkedReq. Lowers the budget by what it computes, and adds its pages to come to those that are promised."""
        raise NotImplementedError("exercise 5.2")


class MyMixed(Mixed):
    # 5.2 cut to the budget
    #   prefill(token_budget) -> list[Req]   no more than so many tokens of prompts; decode() -> list[Req]
    #   Batch(reqs, num_decode=)   num_decode: how many of reqs decode; they come first
    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        """Decode rows first, a token each, then prompts, as many of their tokens as the budget has left."""
        raise NotImplementedError("exercise 5.2")


class MyDecodeManager(DecodeManager):
    # 5.3 who decodes in this step
    #   self.running   dict from uid to Req; self.runnable(): yours too
    #   self.admission.page_size   int
    #   req.uid; req.is_leaving   it has ended, was retracted, or its last token is on its way
    #   req.cached_len (tokens whose K and V are there), req.device_len (those that will be there after this step)
    #   new_pages(start, end, page_size) -> int   what the tokens from start to end need beside the pages of those
    #       before
    def runnable(self) -> list[Req]:
        """Everyone with a token left to compute, by uid: an order that is the same on every rank."""
        raise NotImplementedError("exercise 5.3")

    def schedule(self, pages: int) -> list[Req]:
        """Everyone who can run in this step. When there are fewer pages than are wanted, the first to come get them:
        the others wait for a batch in flight to give some back."""
        raise NotImplementedError("exercise 5.3")


class MyScheduler(Scheduler):
    # 5.4 commit what was sampled
    #   self.eos_ids; self.decode.remove(req)   it runs no more
    #   self.admission.note_finished(output_len)   an answer had so many tokens: estimates learn from it
    #   self.cache.cache_req(req, finished=False)   what is complete of it is there for others, and req goes on
    #   self._release_if_idle(req)   its row and pages come back, unless a batch with it is in flight
    #   self._requeue(req)   a retracted one: releases it, and puts it back into the queue
    #   req.in_flight   batches with it that are not committed; req.retracted; req.uid; req.cached_tokens
    #   req.finish_reason, req.output_len; req.append_host(token_id, eos_ids)   notes it; the finish_reason, or None
    #   TokenOutput(uid, token_id, finish_reason, cached_tokens)
    def _commit(self, req: Req, token_id: int) -> TokenOutput | None:
        """One request of a batch that is done. A request that ended while it was in flight is only released."""
        raise NotImplementedError("exercise 5.4")

    # 5.5 make room by retraction
    #   self._pages_for_decode()   pages that those who run may take; self._next_pages(req): what req needs for its next
    #       token
    #   self.decode.running   dict from uid to Req; self.decode.runnable(): those with a token left to compute, by uid
    #   self.prefill.half_done   the prompt that has a row and waits with its next chunk, a Req; or None
    #   self.cache.available_pages   free ones and those that can be evicted
    #   self.in_flight   list of Batch, scheduled and not committed; batch.reqs
    #   self._retract(req)   back to the queue; req.is_leaving: its pages will come back; req.uid
    def _make_room(self) -> None:
        """Retract who came last, until the others have their next pages: the first to come always gets on, since
        alone it fits. But wait, and retract nobody, while a batch in flight has pages that will come back with it."""
        raise NotImplementedError("exercise 5.5")
