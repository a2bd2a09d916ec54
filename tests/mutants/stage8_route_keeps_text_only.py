"""8.4: keeps replies with text only."""

from __future__ import annotations

from minisgl.stage8.ask import Ask, EngineGone, RequestFailed, RequestRefused
from minisgl.stage8.messages import Reply

kills = "tests/exercises/test_stage8.py::test_a_reply_without_text_is_one_too"
words = "has no text, but its reply"


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
            if reply.text:
                self._keep(index, reply)
        self._wake.set()
        return terminal
