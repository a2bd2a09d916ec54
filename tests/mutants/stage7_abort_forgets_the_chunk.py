"""7.3: what a half-done prompt holds never comes back."""

from __future__ import annotations

from minisgl.core.outputs import TokenOutput
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage7.py::test_a_chunk_in_flight_can_be_aborted"
words = "comes back when nothing"


class MyScheduler(Scheduler):
    def abort(self, uid: int) -> list[TokenOutput]:
        if self.prefill.remove(uid):
            return [TokenOutput(uid, None, "abort", 0)]
        req = self.decode.running.pop(uid, None)
        if req is None:
            return []
        req.finish_reason = "abort"
        self._release_if_idle(req)
        return [TokenOutput(uid, None, "abort", req.cached_tokens)]
