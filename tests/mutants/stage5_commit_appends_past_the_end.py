"""5.4: takes the token of a step that was in flight when the request ended."""

from __future__ import annotations

from minisgl.core.outputs import TokenOutput
from minisgl.core.req import ChunkedReq, Req
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage5.py::test_a_token_past_the_end_is_dropped"
words = "past the end"


class MyScheduler(Scheduler):
    def _commit(self, req: Req, token_id: int) -> TokenOutput | None:
        req.in_flight -= 1
        if isinstance(req, ChunkedReq):
            if req.retracted:
                self._requeue(req)
            return None
        reason = req.append_host(token_id, self.eos_ids)
        if reason is not None:
            self.decode.running.pop(req.uid, None)
            self.admission.note_finished(req.output_len)
            self._release_if_idle(req)
        elif req.retracted:
            self._requeue(req)
        elif req.output_len == 1:
            self.cache.cache_req(req, finished=False)
        return TokenOutput(req.uid, token_id, reason, req.cached_tokens)
