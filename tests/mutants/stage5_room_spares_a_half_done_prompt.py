"""5.5: looks only at those that decode."""

from __future__ import annotations

from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage5.py::test_a_half_done_prompt_can_go_too"
words = "half-done"


class MyScheduler(Scheduler):
    def _make_room(self) -> None:
        holders = self.decode.runnable()
        while len(holders) > 1 and sum(map(self._next_pages, holders)) > self.cache.available_pages:
            if any(req.is_leaving for batch in self.in_flight for req in batch.reqs):
                return
            self._retract(holders.pop())
