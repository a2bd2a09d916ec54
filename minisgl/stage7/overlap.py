"""A step on its way: launched on the engine's stream, committed later. Knows nothing of when that is.

What makes it safe is in the scheduler: lengths advance when a step is scheduled, pages and rows come back only when
no step in flight can write to them, and the next step's ids are read from the device.
"""

from __future__ import annotations

from typing import NamedTuple

from minisgl.core.batch import ForwardInput, ForwardOutput
from minisgl.core.outputs import TokenOutput
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage7.streams import EngineStream, Ticket


class InFlight(NamedTuple):
    """Keeps the input as long as the device may read it. Without that its memory would be given to the next step's
    tensors while this one has still to read it (the walk-through's 4.2.5)."""

    forward_input: ForwardInput
    ticket: Ticket


def launch(scheduler: Scheduler, stream: EngineStream, forward_input: ForwardInput) -> InFlight:
    """Returns at once."""
    tracer, step, batch = scheduler.tracer, scheduler.step, forward_input.batch

    def forward(forward_input: ForwardInput) -> ForwardOutput:
        with tracer.span("forward", "engine", step=step, phase=batch.phase, tokens=len(batch.positions)):
            tracer.flow_end(step, "engine")
            return scheduler.forward(forward_input)

    with tracer.span("launch", "scheduler", step=step):
        tracer.flow_start(step, "scheduler")
        return InFlight(forward_input, stream.submit(forward, forward_input))


def commit(scheduler: Scheduler, step: InFlight) -> list[TokenOutput]:
    """Wait for the step, and take in what it sampled."""
    with scheduler.tracer.span("wait", "scheduler"):
        output = step.ticket.result()
        output.copy_done.synchronize()
    return scheduler.commit(step.forward_input, output)
