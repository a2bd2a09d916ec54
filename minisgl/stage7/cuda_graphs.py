"""What is asked of a GPU, recorded and repeated with one launch. Knows nothing of what it records."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

Replay = Callable[[], None]


class CudaGraphMaker:
    """Graphs that share one memory pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        gc.collect()  # nothing should give memory back while a stream records

    @torch.inference_mode()
    def __call__(self, run: Replay) -> Replay:
        """One graph of what `run` asks of the device."""
        self.rehearse(run)
        self.begin()
        try:
            run()
        finally:  # also when it failed: a stream that records can do nothing else
            replay = self.end()
        return replay

    @torch.inference_mode()
    def rehearse(self, run: Replay) -> None:
        """Outside any graph: kernels are compiled and libraries make their workspaces at their first call."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)

    def begin(self) -> None:
        self._before = torch.cuda.current_stream()
        self._stream.wait_stream(self._before)
        torch.cuda.set_stream(self._stream)
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def end(self) -> Replay:
        """What has been asked of the device since `begin`."""
        try:
            self._graph.capture_end()
        finally:
            torch.cuda.set_stream(self._before)
        self._before.wait_stream(self._stream)
        return self._graph.replay
