"""6.6: every rank takes all that it has."""

from __future__ import annotations

from minisgl.stage6.inbox import LockStepInbox
from minisgl.stage6.messages import Order, Stop

kills = "tests/exercises/test_stage6.py::test_all_take_as_many_as_rank_0"
words = "as rank 0 does"


class MyLockStepInbox(LockStepInbox):
    def receive(self, blocking: bool) -> list[Order] | None:
        if blocking:
            if not self._mailbox:
                self._on_idle()
            self._mailbox.wait()
        self._broadcast(len(self._mailbox))
        orders = [self._decode(message) for message in self._mailbox.take(len(self._mailbox))]
        return None if any(isinstance(order, Stop) for order in orders) else orders
