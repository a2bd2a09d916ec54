"""8.5: forgets the request, and the scheduler computes all of it."""

from __future__ import annotations

from minisgl.stage8.ask import Ask
from minisgl.stage8.frontend import Frontend

kills = "tests/exercises/test_stage8.py::test_leaving_aborts_what_is_open"
words = "are aborted"


class MyAsk(Ask):
    def close(self) -> None:
        uids = list(self._open)
        self._open.clear()
        self._wake.set()
        for uid in uids:
            self._abort(uid)


class MyFrontend(Frontend):
    def abort(self, uid: int) -> None:
        if self._asks.pop(uid, None) is not None:
            self.metrics.end(uid, "abort")
