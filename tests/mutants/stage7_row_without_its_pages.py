"""7.3: the row comes back, its pages do not."""

from __future__ import annotations

from minisgl.core.req import Req
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage7.py::test_all_comes_back_when_nothing_is_in_flight"
words = "comes back when nothing"


class MyScheduler(Scheduler):
    def _release_if_idle(self, req: Req) -> None:
        if req.in_flight == 0:
            self.tables.free(req.table_idx)
