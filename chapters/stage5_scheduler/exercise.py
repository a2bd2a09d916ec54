"""Stage 5, scheduler: your code.

`minisgl start 5` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check 5` says how you stand, `minisgl hint 5.1` helps.
A method may use the rest of its class, and what is imported here; methods that you add beside it are yours too.

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
    def _find_room(self, pending: PendingReq, ids: Tensor) -> CacheHandle | None:
        """A request enters only if the pages it is promised are there, beside those that others were promised. Returns
        the longest cached prefix of ids (int32, on the host), locked; or None, and nothing is locked."""
        raise NotImplementedError("exercise 5.1")

    # 5.2 cut to the budget
    def _cut(self, pending: PendingReq, row: int, cached_len: int, handle: CacheHandle) -> Req:
        """As many of its tokens as the budget allows, from cached_len on: a Req if they are its last, else a
        ChunkedReq. Lowers the budget by what it computes, and adds its pages to come to those that are promised."""
        raise NotImplementedError("exercise 5.2")


class MyMixed(Mixed):
    # 5.2 cut to the budget
    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        """Decode rows first, a token each, then prompts, as many of their tokens as the budget has left."""
        raise NotImplementedError("exercise 5.2")


class MyDecodeManager(DecodeManager):
    # 5.3 who decodes in this step
    def runnable(self) -> list[Req]:
        """Everyone with a token left to compute, by uid: an order that is the same on every rank."""
        raise NotImplementedError("exercise 5.3")

    def schedule(self, pages: int) -> list[Req]:
        """Everyone who can run in this step. When there are fewer pages than are wanted, the first to come get them:
        the others wait for a batch in flight to give some back."""
        raise NotImplementedError("exercise 5.3")


class MyScheduler(Scheduler):
    # 5.4 commit what was sampled
    def _commit(self, req: Req, token_id: int) -> TokenOutput | None:
        """One request of a batch that is done. A request that ended while it was in flight is only released."""
        raise NotImplementedError("exercise 5.4")

    # 5.5 make room by retraction
    def _make_room(self) -> None:
        """Retract who came last, until the others have their next pages: the first to come always gets on, since
        alone it fits. But wait, and retract nobody, while a batch in flight has pages that will come back with it."""
        raise NotImplementedError("exercise 5.5")
