"""The engine's stream: steps run on it in order, beside the thread that launches them. Knows nothing of batches.

A GPU has streams. On a CPU one worker thread plays the part: it is real overlap, since torch lets go of Python's
lock while it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from minisgl.core.batch import ForwardInput, ForwardOutput
from minisgl.core.threads import set_threads

# Of the thread that launches, while another computes. libgomp counts the threads of all teams, and when they are more
# than the cores it lets them sleep at every barrier: a step of 27 ms took 38 when both threads had a team of two.
HOST_THREADS = 1

Forward = Callable[[ForwardInput], ForwardOutput]


class Ticket(Protocol):
    """A step that was launched."""

    def result(self) -> ForwardOutput:
        """The step's output, to wait for its `copy_done`. Raises what the step raised. What the caller asks of the
        device from now on comes after the whole step."""


class EngineStream(Protocol):
    def submit(self, forward: Forward, forward_input: ForwardInput) -> Ticket:
        """Launch a step after those before it, and after all that the caller has asked of the device so far. Its
        input must be kept until the step is done: the device reads it."""

    def close(self) -> None:
        """Wait for what was launched, and end."""


def engine_stream(device: torch.device, threads: int | None) -> EngineStream:
    """threads: of the worker, on a CPU. OpenMP counts them for each thread that starts parallel work."""
    return CudaStream(device) if device.type == "cuda" else ThreadStream(threads)


class ThreadStream:
    """A queue and one thread, which is also alone in using the attention backend's workspace."""

    def __init__(self, threads: int | None) -> None:
        self._worker = ThreadPoolExecutor(1, "engine-stream", initializer=set_threads, initargs=(threads,))

    def submit(self, forward: Forward, forward_input: ForwardInput) -> Ticket:
        return self._worker.submit(forward, forward_input)

    def close(self) -> None:
        self._worker.shutdown(wait=True)


class CudaStream:
    """The caller's current stream prepares (copies of indices, metadata); this one computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, forward: Forward, forward_input: ForwardInput) -> Ticket:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            output = forward(forward_input)
        return CudaTicket(output, self._stream.record_event())

    def close(self) -> None:
        self._stream.synchronize()


class CudaTicket:
    def __init__(self, output: ForwardOutput, done: torch.cuda.Event) -> None:
        self._output, self._done = output, done

    def result(self) -> ForwardOutput:
        # The sampled tokens reach the host before they reach the token pool: a row that is freed for them must not
        # be written for its next owner before that. The host does not wait, and the device rarely has to.
        torch.cuda.current_stream(self._output.next_tokens.device).wait_event(self._done)
        return self._output
