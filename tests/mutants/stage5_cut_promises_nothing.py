"""5.2: whoever is next in the batch does not see what this request was promised."""

from __future__ import annotations

from minisgl.core.protocols import CacheHandle
from minisgl.core.req import ChunkedReq, Req
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.prefill import PrefillAdder

kills = "tests/exercises/test_stage5.py::test_a_chunk_is_promised_all_that_follows"
words = "are promised"


class MyPrefillAdder(PrefillAdder):
    def _cut(self, pending: PendingReq, row: int, cached_len: int, handle: CacheHandle) -> Req:
        end = min(cached_len + self.token_budget, len(pending.input_ids))
        args = (pending.uid, pending.input_ids, pending.sampling_params, row, cached_len, handle, pending.prompt_len)
        req = Req(*args) if end == len(pending.input_ids) else ChunkedReq(*args, chunk_end=end)
        self.token_budget -= req.extend_len
        return req
