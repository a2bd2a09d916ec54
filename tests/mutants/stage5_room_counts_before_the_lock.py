"""5.1: counts what is available before the prefix is locked."""

from __future__ import annotations

from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.prefill import PrefillAdder

kills = "tests/exercises/test_stage5.py::test_its_own_prefix_is_no_room_for_it"
words = "prefix is no room"


class MyPrefillAdder(PrefillAdder):
    def _find_room(self, pending: PendingReq, ids: Tensor) -> CacheHandle | None:
        handle = self.cache.match_req(ids)
        needed = self.admission.pages(handle.cached_len, pending.prompt_len, len(pending.input_ids), pending.max_len)
        if needed + self.promised_pages > self.cache.available_pages:
            return None
        self.cache.lock(handle)
        return handle
