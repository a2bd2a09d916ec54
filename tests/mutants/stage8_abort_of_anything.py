"""8.5: sends an abort for what was never sent, or has ended."""

from __future__ import annotations

from minisgl.stage8.ask import Ask
from minisgl.stage8.frontend import Frontend

kills = "tests/exercises/test_stage8.py::test_what_is_not_open_is_not_aborted"
words = "there is nothing to abort"


class MyAsk(Ask):
    def close(self) -> None:
        uids = list(self._open)
        self._open.clear()
        self._wake.set()
        for uid in uids:
            self._abort(uid)


class MyFrontend(Frontend):
    def abort(self, uid: int) -> None:
        self._asks.pop(uid, None)
        self.metrics.end(uid, "abort")
        self._send_abort(uid)
