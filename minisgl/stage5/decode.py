"""The requests that have all of their prompt behind them. Knows nothing of those that wait."""

from __future__ import annotations

from operator import attrgetter

from minisgl.core.req import Req
from minisgl.learn import exercise
from minisgl.stage5.admission import FullReservation, new_pages


class DecodeManager:
    def __init__(self, admission: FullReservation) -> None:
        self.admission = admission
        self.running: dict[int, Req] = {}  # by uid; until the last token is on the host

    def add(self, reqs: list[Req]) -> None:
        self.running.update((req.uid, req) for req in reqs)

    def remove(self, req: Req) -> None:
        del self.running[req.uid]

    @exercise("5.3")
    def runnable(self) -> list[Req]:
        """Everyone with a token left to compute, by uid: an order that is the same on every rank."""
        return sorted([req for req in self.running.values() if not req.is_leaving], key=attrgetter("uid"))

    @exercise("5.3")
    def schedule(self, pages: int) -> list[Req]:
        """Everyone who can run in this step. When there are fewer pages than are wanted, the first to come get them:
        the others wait for a batch in flight to give some back."""
        reqs = self.runnable()
        if len(reqs) <= pages:  # nobody takes more than one
            return reqs
        chosen = []
        for req in reqs:
            needed = new_pages(req.cached_len, req.device_len, self.admission.page_size)
            if needed <= pages:
                pages -= needed
                chosen.append(req)
        return chosen

    def pages_promised(self) -> int:
        """Pages the running requests were promised and do not have yet."""
        return sum(map(self.admission.pages_to_come, self.running.values()))
