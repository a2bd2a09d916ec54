"""5.4: puts the request into the tree at every token."""

from __future__ import annotations

from minisgl.core.outputs import TokenOutput
from minisgl.core.req import ChunkedReq, Req
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage5.py::test_a_prompt_is_cached_once_after_its_first_token"
words = "cached once"


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
        elif req.retracted:
            self._requeue(req)
        else:
            self.cache.cache_req(req, finished=False)
        return TokenOutput(req.uid, token_id, reason, req.cached_tokens)
