"""7.3: pages and row go to the next request while a step still writes to them."""

from __future__ import annotations

from minisgl.core.req import ChunkedReq, Req
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage7.py::test_nothing_comes_back_in_flight"
words = "still writes"


class MyScheduler(Scheduler):
    def _release_if_idle(self, req: Req) -> None:
        self.cache.cache_req(req, finished=True)
        self.tables.free(req.table_idx)
        self.tracer.end("prefill" if isinstance(req, ChunkedReq) else "decode", req.uid)
