"""Bug 16: what the steps gave is kept until a request ends, and then sent in one message."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core.outputs import TokenOutput
from minisgl.stage8.messages import Step
from minisgl.stage8.scheduler_io import Desk


class MyDesk(Desk):
    def report(self, outputs: Sequence[TokenOutput]) -> None:
        self._flush_if_idle()
        kept: list[TokenOutput] = self.__dict__.setdefault("_kept", [])
        kept += outputs
        if not any(output.finish_reason for output in outputs):
            return
        uids, token_ids, reasons, cached, _, _ = (list(column) for column in zip(*kept, strict=True))
        self._send(Step(uids, token_ids, reasons, cached, [self._prompt_tokens[uid] for uid in uids]))
        kept.clear()
        for output in outputs:
            if output.finish_reason:
                del self._prompt_tokens[output.uid]
                self._arrived.pop(output.uid, None)
