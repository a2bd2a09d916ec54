"""5.3: cuts the list by the number of pages, as if everyone needed one."""

from __future__ import annotations

from minisgl.core.req import Req
from minisgl.stage5.decode import DecodeManager

kills = "tests/exercises/test_stage5.py::test_who_needs_no_page_runs_all_the_same"
words = "needs no page"


class MyDecodeManager(DecodeManager):
    def schedule(self, pages: int) -> list[Req]:
        return self.runnable()[:pages]
