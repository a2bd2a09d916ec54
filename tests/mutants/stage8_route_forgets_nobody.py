"""8.4: a request that has ended stays open, until the server takes no more."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.stage8.ask import Ask, EngineGone, RequestFailed, RequestRefused
from minisgl.stage8.frontend import Frontend
from minisgl.stage8.messages import Reply

kills = "tests/exercises/test_stage8.py::test_the_last_reply_closes_the_request"
words = "1 request is open"


class MyAsk(Ask):
    def put(self, reply: Reply) -> bool:
        terminal = reply.error is not None or reply.finish_reason is not None
        index = self._open.pop(reply.uid) if terminal else self._open[reply.uid]
        if reply.error is not None:
            refused = RequestRefused(reply.error, reply.param, reply.code)
            self._failure = RequestFailed(reply.error) if reply.is_bug else refused
        elif reply.finish_reason == "abort":
            self._failure = EngineGone("the server ended this request before it was finished")
        else:
            self._silent.discard(index)
            self._keep(index, reply)
        self._wake.set()
        return terminal


class MyFrontend(Frontend):
    def _route(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            self._tracer.instant("Reply", "messages", reply.uid, tokens=len(reply.token_ids))
            ask = self._asks.get(reply.uid)
            if ask is None:
                self.late += 1
            elif ask.put(reply) and reply.is_bug:
                self._send_abort(reply.uid)
