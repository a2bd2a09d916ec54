"""5.1: counts the prompt alone for one that has made tokens and was retracted."""

from __future__ import annotations

from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.prefill import PrefillAdder

kills = "tests/exercises/test_stage5.py::test_one_that_was_retracted_is_promised_for_all_it_has"
words = "it has 14 tokens"


class MyPrefillAdder(PrefillAdder):
    def _find_room(self, pending: PendingReq, ids: Tensor) -> CacheHandle | None:
        handle = self.cache.match_req(ids)
        self.cache.lock(handle)
        needed = self.admission.pages(handle.cached_len, pending.prompt_len, pending.prompt_len, pending.max_len)
        if needed + self.promised_pages > self.cache.available_pages:
            self.cache.unlock(handle)
            return None
        return handle
