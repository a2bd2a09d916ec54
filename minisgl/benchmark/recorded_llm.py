"""Stage 7's LLM whose trace has every kernel of its device, for `record-trace`. Its ranks find it by this module."""

from __future__ import annotations

from contextlib import closing

from minisgl.benchmark.device_trace import traced_kernels
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.inbox import Inbox
from minisgl.stage7.llm import LLM as Stage7LLM
from minisgl.stage7.llm import Steps


class LLM(Stage7LLM):
    @staticmethod
    def serve(scheduler: Scheduler, inbox: Inbox) -> Steps:
        """Runs in each rank's own process. The first run, until nothing waits or runs, warms up and is not profiled."""
        with closing(Stage7LLM.serve(scheduler, inbox)) as loop:
            for outputs in loop:
                yield outputs
                if not scheduler.has_work:
                    break
            with traced_kernels(scheduler.tracer):
                yield from loop
