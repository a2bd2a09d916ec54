"""8.4: blames the client for a bug of ours."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.stage8.ask import Ask, EngineGone, RequestRefused
from minisgl.stage8.frontend import Frontend
from minisgl.stage8.messages import Reply

kills = "tests/exercises/test_stage8.py::test_how_a_request_fails"
words = "RequestFailed is to be raised"


class MyAsk(Ask):
    def put(self, reply: Reply) -> bool:
        terminal = reply.error is not None or reply.finish_reason is not None
        index = self._open.pop(reply.uid) if terminal else self._open[reply.uid]
        if reply.error is not None:
            self._failure = RequestRefused(reply.error, reply.param, reply.code)
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
            elif ask.put(reply):
                del self._asks[reply.uid]
                if reply.is_bug:
                    self._send_abort(reply.uid)
