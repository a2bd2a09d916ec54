"""5.1: who waits keeps its prefix locked."""

from __future__ import annotations

from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.prefill import PrefillAdder

kills = "tests/exercises/test_stage5.py::test_who_waits_holds_nothing"
words = "holds nothing"


class MyPrefillAdder(PrefillAdder):
    def _find_room(self, pending: PendingReq, ids: Tensor) -> CacheHandle | None:
        handle = self.cache.match_req(ids)
        self.cache.lock(handle)
        needed = self.admission.pages(handle.cached_len, pending.prompt_len, len(pending.input_ids), pending.max_len)
        return handle if needed + self.promised_pages <= self.cache.available_pages else None
