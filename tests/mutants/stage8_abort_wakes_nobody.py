"""8.5: a reader in another task waits for ever."""

from __future__ import annotations

from minisgl.stage8.ask import Ask
from minisgl.stage8.frontend import Frontend

kills = "tests/exercises/test_stage8.py::test_who_waits_is_let_go"
words = "waits for ever"


class MyAsk(Ask):
    def close(self) -> None:
        uids = list(self._open)
        self._open.clear()
        for uid in uids:
            self._abort(uid)


class MyFrontend(Frontend):
    def abort(self, uid: int) -> None:
        if self._asks.pop(uid, None) is not None:
            self.metrics.end(uid, "abort")
            self._send_abort(uid)
