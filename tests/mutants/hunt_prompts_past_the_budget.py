"""Bug 8: a prompt is never cut, however small the budget."""

from __future__ import annotations

from minisgl.core.req import ChunkedReq, Req
from minisgl.stage5.scheduler import Scheduler


class MyScheduler(Scheduler):
    def _next_prompts(self, token_budget: int) -> list[Req]:
        if not self.prefill.has_turn:
            return []
        reqs = self.prefill.schedule(self.engine.max_seq_len, self.decode.pages_promised())
        self.decode.add([req for req in reqs if not isinstance(req, ChunkedReq)])
        return reqs
