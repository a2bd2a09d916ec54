"""7.1: commits the step that it has just launched."""

from __future__ import annotations

from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.inbox import Inbox, carry_out
from minisgl.stage7.llm import LLM, Steps
from minisgl.stage7.overlap import commit, launch
from minisgl.stage7.streams import EngineStream

kills = "tests/exercises/test_stage7.py::test_a_step_is_scheduled_before_the_one_before_it_is_known"
words = "is scheduled before"


class MyLLM(LLM):
    @staticmethod
    def overlap_loop(scheduler: Scheduler, inbox: Inbox, stream: EngineStream) -> Steps:
        while (orders := inbox.receive(blocking=not scheduler.has_work)) is not None:
            outputs = carry_out(scheduler, orders)
            forward_input = scheduler.schedule()
            if forward_input is not None:
                outputs += commit(scheduler, launch(scheduler, stream, forward_input))
            yield outputs
