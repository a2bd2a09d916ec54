"""7.3: does not look into the queue."""

from __future__ import annotations

from minisgl.core.outputs import TokenOutput
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage7.py::test_who_waits_is_taken_out_of_the_queue"
words = "one terminal output"


class MyScheduler(Scheduler):
    def abort(self, uid: int) -> list[TokenOutput]:
        req = self.decode.running.pop(uid, None)
        if req is None:
            return []
        req.finish_reason = "abort"
        self._release_if_idle(req)
        return [TokenOutput(uid, None, "abort", req.cached_tokens)]
