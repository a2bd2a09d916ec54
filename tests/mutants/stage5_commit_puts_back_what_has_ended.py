"""5.4: two separate questions instead of one with cases: one that has ended goes back to the queue as well."""

from __future__ import annotations

from minisgl.core.outputs import TokenOutput
from minisgl.core.req import ChunkedReq, Req
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage5.py::test_an_end_is_an_end_for_one_that_was_retracted"
words = "must not go back as well"


class MyScheduler(Scheduler):
    def _commit(self, req: Req, token_id: int) -> TokenOutput | None:
        req.in_flight -= 1
        if req.finish_reason is not None:
            self._release_if_idle(req)
            return None
        if isinstance(req, ChunkedReq):
            if req.retracted:
                self._requeue(req)
            return None
        reason = req.append_host(token_id, self.eos_ids)
        if reason is not None:
            self.decode.remove(req)
            self.admission.note_finished(req.output_len)
            self._release_if_idle(req)
        if req.retracted:
            self._requeue(req)
        elif req.output_len == 1:
            self.cache.cache_req(req, finished=False)
        return TokenOutput(req.uid, token_id, reason, req.cached_tokens)
