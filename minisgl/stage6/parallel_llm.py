"""The caller's side of a loop that runs in ranks: orders in, outputs back. Knows nothing of the loop itself.

One rank runs in the caller's process, where the caller's own `next` drives the loop; several are processes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar

from minisgl.core.llm import BaseLLM, Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage3.page_count import check_fits
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.config import ParallelConfig
from minisgl.stage6.engine import RankEngine, check_parallel
from minisgl.stage6.inbox import Inbox, LocalInbox
from minisgl.stage6.messages import Abort, AddRequests, Order, Ready
from minisgl.stage6.ranks import RankGroup

Serve = Callable[[Scheduler, Inbox], Generator[list[TokenOutput], None, None]]


class LocalRank:
    """The only rank, here. Has the methods of `RankGroup`."""

    def __init__(self, scheduler: Scheduler, serve: Serve, ready: Ready) -> None:
        self.scheduler = scheduler
        self.ready = [ready]
        self.num_pages = ready.num_pages
        self._inbox = LocalInbox()
        self._loop = serve(scheduler, self._inbox)
        self.alive = True

    @property
    def stats(self) -> dict[str, int]:
        return self.scheduler.stats()

    def send(self, order: Order) -> None:
        """Raises RuntimeError when an error, or Ctrl-C in the midst of a step, has ended the loop."""
        if not self.alive:
            raise RuntimeError("the loop of this LLM was ended by an error: make a new one")
        self._inbox.put(order)

    def outputs(self) -> list[TokenOutput]:
        try:
            return next(self._loop)
        except BaseException:
            self.alive = False
            raise

    def drain(self) -> None:
        while not self._inbox.idle:
            self.outputs()

    def close(self) -> None:
        self.alive = False
        self._loop.close()


class ParallelLLM(BaseLLM):
    """What the LLMs of all stages with ranks have in common: all but the engine and the loop."""

    config: ParallelConfig
    config_class = ParallelConfig
    gives_logprobs = True
    engine_class: ClassVar[type[RankEngine]] = RankEngine

    @staticmethod
    @abstractmethod
    def serve(scheduler: Scheduler, inbox: Inbox) -> Generator[list[TokenOutput], None, None]:
        """The loop of a rank: yields what each step gave, until the inbox says that it is over."""

    def _start(self) -> None:
        check_parallel(self.config, self.model_config)
        eos_ids = self.tokenizer.eos_ids
        if self.config.tp > 1:
            module = type(self).__module__
            self.ranks: LocalRank | RankGroup = RankGroup(module, self.config, self.folder, self.max_seq_len, eos_ids)
            return
        engine = self.engine_class(self.engine_config(), self.folder, self.model_config, self.max_seq_len)
        scheduler = Scheduler(self.config, engine, eos_ids, self.tracer)
        self.ranks = LocalRank(scheduler, self.serve, Ready(engine.pool.num_pages, *engine.memory()))

    def engine_config(self) -> ParallelConfig:
        """The settings of an engine in the caller's process."""
        return self.config

    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        if not requests:
            return
        unfinished = {request.uid for request in requests}
        self.ranks.send(AddRequests(requests))
        try:
            while unfinished:
                yield from self._next(unfinished)
        except (GeneratorExit, KeyboardInterrupt):  # the caller wants no more of it
            if self.ranks.alive:
                self._abort(unfinished)
            raise
        self.ranks.drain()

    def _abort(self, unfinished: set[int]) -> None:
        self.ranks.send(Abort(sorted(unfinished)))
        while unfinished:
            self._next(unfinished)
        self.ranks.drain()

    def _next(self, unfinished: set[int]) -> list[TokenOutput]:
        outputs = self.ranks.outputs()
        unfinished.difference_update(output.uid for output in outputs if output.finish_reason)
        return outputs

    def _check(self, prompt: str | Sequence[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        ids, params = super()._check(prompt, params)
        check_fits(len(ids), params, self.config.page_size, self.ranks.num_pages)
        return ids, params

    def _stop(self) -> None:
        if hasattr(self, "ranks"):
            self.ranks.close()

    def stats(self) -> dict[str, int]:
        self._check_open()
        return self.ranks.stats
