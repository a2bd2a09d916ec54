"""5.3: everyone, also whose last token is on its way."""

from __future__ import annotations

from minisgl.core.req import Req
from minisgl.stage5.decode import DecodeManager

kills = "tests/exercises/test_stage5.py::test_who_leaves_does_not_run"
words = "leaving"


class MyDecodeManager(DecodeManager):
    def runnable(self) -> list[Req]:
        return sorted(self.running.values(), key=lambda req: req.uid)
