"""5.1: counts the pages of the prompt, and none of the answer."""

from __future__ import annotations

from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.stage5.admission import new_pages
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.prefill import PrefillAdder

kills = "tests/exercises/test_stage5.py::test_it_waits_when_a_page_is_missing"
words = "must wait"


class MyPrefillAdder(PrefillAdder):
    def _find_room(self, pending: PendingReq, ids: Tensor) -> CacheHandle | None:
        handle = self.cache.match_req(ids)
        self.cache.lock(handle)
        needed = new_pages(handle.cached_len, len(pending.input_ids), self.cache.page_size)
        if needed + self.promised_pages > self.cache.available_pages:
            self.cache.unlock(handle)
            return None
        return handle
