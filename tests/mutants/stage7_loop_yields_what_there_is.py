"""7.1: a turn without outputs yields nothing."""

from __future__ import annotations

from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.inbox import Inbox, carry_out
from minisgl.stage7.llm import LLM, Steps
from minisgl.stage7.overlap import InFlight, commit, launch
from minisgl.stage7.streams import EngineStream

kills = "tests/exercises/test_stage7.py::test_every_turn_yields"
words = "yields an empty list too"


class MyLLM(LLM):
    @staticmethod
    def overlap_loop(scheduler: Scheduler, inbox: Inbox, stream: EngineStream) -> Steps:
        last: InFlight | None = None
        while (orders := inbox.receive(blocking=last is None and not scheduler.has_work)) is not None:
            outputs = carry_out(scheduler, orders)
            forward_input = scheduler.schedule()
            launched = launch(scheduler, stream, forward_input) if forward_input is not None else None
            if last is not None:
                outputs += commit(scheduler, last)
            elif launched is None and scheduler.has_work:
                raise RuntimeError("requests wait, and nothing runs")
            last = launched
            if outputs:
                yield outputs
