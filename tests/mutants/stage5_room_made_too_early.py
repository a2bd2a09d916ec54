"""5.5: makes room for all that was promised, and not for the next page."""

from __future__ import annotations

from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage5.py::test_nobody_goes_while_there_is_room"
words = "while there is room"


class MyScheduler(Scheduler):
    def _make_room(self) -> None:
        half_done = self.prefill.half_done
        holders = sorted([*self.decode.runnable(), *([half_done] if half_done else [])], key=lambda req: req.uid)
        while len(holders) > 1 and sum(map(self.admission.pages_to_come, holders)) > self.cache.available_pages:
            if any(req.is_leaving for batch in self.in_flight for req in batch.reqs):
                return
            self._retract(holders.pop())
