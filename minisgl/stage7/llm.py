"""Two loops of one rank: one that waits for each step, and one that uses the wait. Knows nothing of streams' kinds."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

import torch

from minisgl.core.outputs import TokenOutput
from minisgl.core.threads import set_threads
from minisgl.learn import exercise
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.inbox import Inbox, carry_out
from minisgl.stage6.parallel_llm import ParallelLLM
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.graph_runner import GraphEngine
from minisgl.stage7.overlap import InFlight, commit, launch
from minisgl.stage7.streams import HOST_THREADS, EngineStream, engine_stream

Steps = Generator[list[TokenOutput], None, None]


class LLM(ParallelLLM):
    config: OverlapConfig
    config_class = OverlapConfig
    engine_class = GraphEngine

    def _start(self) -> None:
        self._threads = torch.get_num_threads()
        if not self.config.disable_overlap:
            self.config = replace(self.config, threads=self.config.threads or self._threads)
        super()._start()

    def engine_config(self) -> OverlapConfig:
        """With overlap the caller's thread only launches; the stream's computes with all threads."""
        return self.config if self.config.disable_overlap else replace(self.config, threads=HOST_THREADS)

    def _stop(self) -> None:
        super()._stop()
        set_threads(self._threads)

    @staticmethod
    def plain_loop(scheduler: Scheduler, inbox: Inbox) -> Steps:
        """schedule N, compute N, commit N: while one of host and device works, the other has nothing to do."""
        while (orders := inbox.receive(blocking=not scheduler.has_work)) is not None:
            outputs = carry_out(scheduler, orders)
            forward_input = scheduler.schedule()
            if forward_input is not None:
                with scheduler.tracer.span("forward", "engine", step=scheduler.step):
                    output = scheduler.forward(forward_input)
                outputs += scheduler.commit(forward_input, output)
            elif scheduler.has_work:
                raise RuntimeError("requests wait, nothing runs, and none can be admitted: this is a bug")
            yield outputs

    @staticmethod
    @exercise("7.1")
    def overlap_loop(scheduler: Scheduler, inbox: Inbox, stream: EngineStream) -> Steps:
        """schedule N, launch N, commit N - 1: the host works on the steps around the one that the device computes.

        N is scheduled before the tokens of N - 1 are known, so a request that they end is computed once more for
        nothing.
        """
        last: InFlight | None = None
        while (orders := inbox.receive(blocking=last is None and not scheduler.has_work)) is not None:
            outputs = carry_out(scheduler, orders)
            forward_input = scheduler.schedule()
            launched = launch(scheduler, stream, forward_input) if forward_input is not None else None
            if last is not None:
                outputs += commit(scheduler, last)
            elif launched is None and scheduler.has_work:
                raise RuntimeError("requests wait, nothing runs, and none can be admitted: this is a bug")
            last = launched
            yield outputs

    @staticmethod
    def serve(scheduler: Scheduler, inbox: Inbox) -> Steps:
        config = scheduler.config
        assert isinstance(config, OverlapConfig)
        if config.disable_overlap:
            yield from LLM.plain_loop(scheduler, inbox)
            return
        with closing(engine_stream(scheduler.engine.device, config.threads)) as stream:
            yield from LLM.overlap_loop(scheduler, inbox, stream)
