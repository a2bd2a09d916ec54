"""Bug 2: what was computed does not count as cached, so that every step computes all of it again."""

from __future__ import annotations

from minisgl.core.req import Req


class MyReq(Req):
    def complete_one(self) -> None:
        self.device_len += 1
