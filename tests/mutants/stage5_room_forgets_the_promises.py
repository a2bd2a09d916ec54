"""5.1: looks at what is free, and not at what others will still take of it."""

from __future__ import annotations

from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.prefill import PrefillAdder

kills = "tests/exercises/test_stage5.py::test_what_was_promised_to_others_is_not_there"
words = "promised to others"


class MyPrefillAdder(PrefillAdder):
    def _find_room(self, pending: PendingReq, ids: Tensor) -> CacheHandle | None:
        handle = self.cache.match_req(ids)
        self.cache.lock(handle)
        needed = self.admission.pages(handle.cached_len, pending.prompt_len, len(pending.input_ids), pending.max_len)
        if needed > self.cache.available_pages:
            self.cache.unlock(handle)
            return None
        return handle
