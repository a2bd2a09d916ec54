"""The requests that have all of their prompt behind them. Knows nothing of those that wait."""

from __future__ import annotations

from minisgl.core.req import Req


class DecodeManager:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.running: dict[int, Req] = {}  # by uid; until the last token is on the host

    def add(self, reqs: list[Req]) -> None:
        self.running.update((req.uid, req) for req in reqs)

    def remove(self, req: Req) -> None:
        del self.running[req.uid]

    def runnable(self) -> list[Req]:
        """Everyone with a token left to compute, by uid: an order that is the same on every rank."""
        return sorted((req for req in self.running.values() if req.can_decode), key=lambda req: req.uid)

    def reserved_pages(self) -> int:
        """Pages the running requests may still ask for. They were promised at admission."""
        return sum(pages_to_come(req, self.page_size) for req in self.running.values())


def pages_to_come(req: Req, page_size: int) -> int:
    """Pages between what is allocated (up to cached_len) and the last token this request may compute."""
    return max(0, -(-(req.max_device_len - 1) // page_size) - -(-req.cached_len // page_size))
