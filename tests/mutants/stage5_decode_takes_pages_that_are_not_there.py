"""5.3: everyone, whatever there is."""

from __future__ import annotations

from minisgl.core.req import Req
from minisgl.stage5.decode import DecodeManager

kills = "tests/exercises/test_stage5.py::test_the_first_to_come_get_the_pages"
words = "get the pages"


class MyDecodeManager(DecodeManager):
    def schedule(self, pages: int) -> list[Req]:
        return self.runnable()
