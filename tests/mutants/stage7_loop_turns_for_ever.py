"""7.1: does not notice that nothing can run."""

from __future__ import annotations

from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.inbox import Inbox, carry_out
from minisgl.stage7.llm import LLM, Steps
from minisgl.stage7.overlap import InFlight, commit, launch
from minisgl.stage7.streams import EngineStream

kills = "tests/exercises/test_stage7.py::test_a_loop_that_is_stuck_says_so"
words = "no later turn will do better"


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
            last = launched
            yield outputs
