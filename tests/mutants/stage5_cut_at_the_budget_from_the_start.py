"""5.2: the budget counts from token 0, and not from what is cached."""

from __future__ import annotations

from minisgl.core.protocols import CacheHandle
from minisgl.core.req import ChunkedReq, Req
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.prefill import PrefillAdder

kills = "tests/exercises/test_stage5.py::test_the_last_chunk_is_a_request"
words = "from cached_len on"


class MyPrefillAdder(PrefillAdder):
    def _cut(self, pending: PendingReq, row: int, cached_len: int, handle: CacheHandle) -> Req:
        end = min(self.token_budget, len(pending.input_ids))
        args = (pending.uid, pending.input_ids, pending.sampling_params, row, cached_len, handle, pending.prompt_len)
        req = Req(*args) if end == len(pending.input_ids) else ChunkedReq(*args, chunk_end=end)
        self.token_budget -= req.extend_len
        self.promised_pages += self.admission.pages_to_come(req)
        return req
