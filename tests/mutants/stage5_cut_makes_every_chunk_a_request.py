"""5.2: a chunk is a Req with fewer tokens, from which one is sampled."""

from __future__ import annotations

from minisgl.core.protocols import CacheHandle
from minisgl.core.req import Req
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.prefill import PrefillAdder

kills = "tests/exercises/test_stage5.py::test_a_prompt_that_does_not_fit_is_a_chunk"
words = "sampled too soon"


class MyPrefillAdder(PrefillAdder):
    def _cut(self, pending: PendingReq, row: int, cached_len: int, handle: CacheHandle) -> Req:
        end = min(cached_len + self.token_budget, len(pending.input_ids))
        ids = pending.input_ids[:end]
        req = Req(pending.uid, ids, pending.sampling_params, row, cached_len, handle, pending.prompt_len)
        self.token_budget -= req.extend_len
        self.promised_pages += self.admission.pages_to_come(req)
        return req
