"""5.5: retracts one, which may be too few."""

from __future__ import annotations

from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage5.py::test_as_many_go_as_it_takes"
words = "As many go as it takes"


class MyScheduler(Scheduler):
    def _make_room(self) -> None:
        half_done = self.prefill.half_done
        holders = sorted([*self.decode.runnable(), *([half_done] if half_done else [])], key=lambda req: req.uid)
        if len(holders) > 1 and sum(map(self._next_pages, holders)) > self.cache.available_pages:
            if any(req.is_leaving for batch in self.in_flight for req in batch.reqs):
                return
            self._retract(holders.pop())
