"""Bug 15: the loop waits for a message in every turn, also when there is work."""

from __future__ import annotations

from minisgl.stage8.messages import Message
from minisgl.stage8.scheduler_io import HEARTBEAT_SECONDS, FirstRankInbox


class MyFirstRankInbox(FirstRankInbox):
    def receive(self, wait: bool) -> list[Message]:
        received = self.inbox.receive_raw(HEARTBEAT_SECONDS)
        if self._publisher and (received or not wait):
            self._publisher.send(received)
        return self.inbox.decoder.decode_all(received)
