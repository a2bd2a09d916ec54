"""The loop of one rank among several that take every step together. Knows nothing of how they are reached."""

from __future__ import annotations

from collections.abc import Generator

from minisgl.core.outputs import TokenOutput
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.inbox import Inbox, carry_out
from minisgl.stage6.parallel_llm import ParallelLLM


class LLM(ParallelLLM):
    @staticmethod
    def serve(scheduler: Scheduler, inbox: Inbox) -> Generator[list[TokenOutput], None, None]:
        """All ranks run this, and in lock step: the same orders before the same step, so the same batch, whose layers
        add up their shares; then the same tokens, since a draw depends on seed and position only."""
        while (orders := inbox.receive(blocking=not scheduler.has_work)) is not None:
            outputs = carry_out(scheduler, orders)
            forward_input = scheduler.schedule()
            if forward_input is not None:
                with scheduler.tracer.span("forward", "engine", tokens=len(forward_input.batch.positions)):
                    output = scheduler.forward(forward_input)
                outputs += scheduler.commit(forward_input, output)
            elif scheduler.has_work:
                raise RuntimeError("requests wait, nothing runs, and none can be admitted: this is a bug")
            yield outputs
