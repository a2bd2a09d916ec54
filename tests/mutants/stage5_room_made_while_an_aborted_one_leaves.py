"""5.5: looks for who is leaving among those that run, where one that was aborted is not."""

from __future__ import annotations

from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage5.py::test_pages_that_are_coming_back_are_waited_for"
words = "it was aborted in flight"


class MyScheduler(Scheduler):
    def _make_room(self) -> None:
        half_done = self.prefill.half_done
        holders = sorted([*self.decode.runnable(), *([half_done] if half_done else [])], key=lambda req: req.uid)
        while len(holders) > 1 and sum(map(self._next_pages, holders)) > self.cache.available_pages:
            if any(req.is_leaving for req in self.decode.running.values()):
                return
            self._retract(holders.pop())
