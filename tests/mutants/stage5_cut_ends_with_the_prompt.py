"""5.2: takes the end of the prompt for the end of what is to be computed."""

from __future__ import annotations

from minisgl.core.protocols import CacheHandle
from minisgl.core.req import ChunkedReq, Req
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.prefill import PrefillAdder

kills = "tests/exercises/test_stage5.py::test_what_was_sampled_before_a_retraction_is_no_prompt"
words = "although the prompt ends there"


class MyPrefillAdder(PrefillAdder):
    def _cut(self, pending: PendingReq, row: int, cached_len: int, handle: CacheHandle) -> Req:
        end = min(cached_len + self.token_budget, len(pending.input_ids))
        args = (pending.uid, pending.input_ids, pending.sampling_params, row, cached_len, handle, pending.prompt_len)
        req = Req(*args) if end >= pending.prompt_len else ChunkedReq(*args, chunk_end=end)
        self.token_budget -= req.extend_len
        self.promised_pages += self.admission.pages_to_come(req)
        return req
