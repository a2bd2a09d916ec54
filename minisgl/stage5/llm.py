"""The loop with a scheduler: every step may have other members. Knows nothing of other ranks or of overlap."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from minisgl.core.errors import EngineFailure
from minisgl.core.llm import BaseLLM, Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage3.engine import Engine
from minisgl.stage3.page_count import check_fits
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.scheduler import Scheduler


class LLM(BaseLLM):
    config: SchedulerConfig
    config_class = SchedulerConfig
    gives_logprobs = True

    def _start(self) -> None:
        engine = Engine(self.config, self.folder, self.model_config, self.max_seq_len)
        self.scheduler = Scheduler(self.config, engine, self.tokenizer.eos_ids, self.tracer)

    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        scheduler = self.scheduler
        if scheduler.in_flight:
            raise EngineFailure("an error broke into a step of this LLM, and what it held is lost: make a new one")
        for request in requests:
            scheduler.add(request.uid, request.prompt_ids, request.sampling_params)
        try:
            while scheduler.has_work:
                forward_input = scheduler.schedule()
                if forward_input is None:
                    raise RuntimeError("requests wait, nothing runs, and none can be admitted: this is a bug")
                with self.tracer.span("forward", "engine", tokens=len(forward_input.batch.positions)):
                    output = scheduler.forward(forward_input)
                yield from scheduler.commit(forward_input, output)
        finally:  # also when the caller closes the generator half-way
            with scheduler.cache.freeing():
                for request in requests:
                    scheduler.abort(request.uid)

    def _check(self, prompt: str | Sequence[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        ids, params = super()._check(prompt, params)
        check_fits(len(ids), params, self.config.page_size, self.scheduler.cache.num_pages)
        return ids, params

    def stats(self) -> dict[str, int]:
        self._check_open()
        return self.scheduler.stats()
