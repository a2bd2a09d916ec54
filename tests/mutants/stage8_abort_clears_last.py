"""8.5: aborts first and forgets then: whoever hears of it and closes again starts over."""

from __future__ import annotations

from minisgl.stage8.ask import Ask
from minisgl.stage8.frontend import Frontend

kills = "tests/exercises/test_stage8.py::test_what_an_abort_sets_off_finds_all_closed"
words = "comes back to itself"


class MyAsk(Ask):
    def close(self) -> None:
        for uid in list(self._open):
            self._abort(uid)
        self._open.clear()
        self._wake.set()


class MyFrontend(Frontend):
    def abort(self, uid: int) -> None:
        if self._asks.pop(uid, None) is not None:
            self.metrics.end(uid, "abort")
            self._send_abort(uid)
