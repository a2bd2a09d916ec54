"""5.4: a chunk that was aborted in flight is never released."""

from __future__ import annotations

from minisgl.core.outputs import TokenOutput
from minisgl.core.req import ChunkedReq, Req
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage5.py::test_a_chunk_that_was_aborted_is_released"
words = "asked before what it is"


class MyScheduler(Scheduler):
    def _commit(self, req: Req, token_id: int) -> TokenOutput | None:
        req.in_flight -= 1
        if isinstance(req, ChunkedReq):
            if req.retracted:
                self._requeue(req)
            return None
        if req.finish_reason is not None:
            self._release_if_idle(req)
            return None
        reason = req.append_host(token_id, self.eos_ids)
        if reason is not None:
            self.decode.remove(req)
            self.admission.note_finished(req.output_len)
            self._release_if_idle(req)
        elif req.retracted:
            self._requeue(req)
        elif req.output_len == 1:
            self.cache.cache_req(req, finished=False)
        return TokenOutput(req.uid, token_id, reason, req.cached_tokens)
