"""7.3: the trace never hears that the request has ended."""

from __future__ import annotations

from minisgl.core.req import Req
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage7.py::test_the_trace_hears_of_every_end"
words = "the trace gets the end"


class MyScheduler(Scheduler):
    def _release_if_idle(self, req: Req) -> None:
        if req.in_flight == 0:
            self.cache.cache_req(req, finished=True)
            self.tables.free(req.table_idx)
