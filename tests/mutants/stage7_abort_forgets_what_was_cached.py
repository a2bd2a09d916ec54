"""7.3: says that nothing of the prompt was found."""

from __future__ import annotations

from minisgl.core.outputs import TokenOutput
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage7.py::test_an_abort_says_what_was_cached"
words = "8 tokens of its prompt were found"


class MyScheduler(Scheduler):
    def abort(self, uid: int) -> list[TokenOutput]:
        pending = self.prefill.remove(uid)
        req = pending.chunk if pending else self.decode.running.pop(uid, None)
        if req is not None:
            req.finish_reason = "abort"
            self._release_if_idle(req)
        elif pending is None:
            return []
        else:
            self.tracer.end(pending.state, uid)
        return [TokenOutput(uid, None, "abort", 0)]
