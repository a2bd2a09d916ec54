"""5.3: in the order in which prompts were done, which differs after a retraction."""

from __future__ import annotations

from minisgl.core.req import Req
from minisgl.stage5.decode import DecodeManager

kills = "tests/exercises/test_stage5.py::test_who_runs_is_in_the_order_of_uids"
words = "order of uids"


class MyDecodeManager(DecodeManager):
    def runnable(self) -> list[Req]:
        return [req for req in self.running.values() if not req.is_leaving]
