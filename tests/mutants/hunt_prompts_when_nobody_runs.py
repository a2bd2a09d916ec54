"""Bug 9: nobody is admitted while somebody runs."""

from __future__ import annotations

from minisgl.core.req import ChunkedReq, Req
from minisgl.stage5.scheduler import Scheduler


class MyScheduler(Scheduler):
    def _next_prompts(self, token_budget: int) -> list[Req]:
        if token_budget <= 0 or self.decode.running or not self.prefill.has_turn:
            return []
        reqs = self.prefill.schedule(token_budget, self.decode.pages_promised())
        self.decode.add([req for req in reqs if not isinstance(req, ChunkedReq)])
        return reqs
