"""5.5: takes what the half-done prompt needs off what is available, and counts it among the needs."""

from __future__ import annotations

from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage5.py::test_a_half_done_prompt_stays_while_its_pages_are_there"
words = "nobody goes while there is room"


class MyScheduler(Scheduler):
    def _make_room(self) -> None:
        half_done = self.prefill.half_done
        holders = sorted([*self.decode.runnable(), *([half_done] if half_done else [])], key=lambda req: req.uid)
        while len(holders) > 1 and sum(map(self._next_pages, holders)) > self._pages_for_decode():
            if any(req.is_leaving for batch in self.in_flight for req in batch.reqs):
                return
            self._retract(holders.pop())
