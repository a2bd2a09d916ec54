"""6.6: the ranks agree on 0 messages, and wait for one afterwards."""

from __future__ import annotations

from minisgl.stage6.inbox import LockStepInbox
from minisgl.stage6.messages import Order, Stop

kills = "tests/exercises/test_stage6.py::test_who_has_nothing_to_do_waits_first"
words = "only then broadcast"


class MyLockStepInbox(LockStepInbox):
    def receive(self, blocking: bool) -> list[Order] | None:
        count = self._broadcast(len(self._mailbox))
        if blocking:
            if not self._mailbox:
                self._on_idle()
            self._mailbox.wait()
            count = max(count, 1)
        orders = [self._decode(message) for message in self._mailbox.take(count)]
        return None if any(isinstance(order, Stop) for order in orders) else orders
