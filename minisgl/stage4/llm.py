"""The loop over a static batch, with prefixes remembered: what was computed once is not computed again.

Each prompt is cached as soon as it is prefilled, so that the next one of the same call already finds it.
Knows nothing of who arrives later: as in stage 3, a group of requests ends before the next one begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence

import torch

from minisgl.core.batch import Batch
from minisgl.core.llm import BaseLLM, Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage3.engine import Engine
from minisgl.stage3.page_count import check_fits, max_pages
from minisgl.stage4.cache_manager import CacheManager
from minisgl.stage4.config import CacheConfig


class LLM(BaseLLM):
    config: CacheConfig
    config_class = CacheConfig

    def _start(self) -> None:
        self.engine = Engine(self.config, self.folder, self.model_config, self.max_seq_len)
        self.table = self.engine.table
        self.manager = CacheManager(self.table, self.engine.pool.num_pages, self.config.cache, self.tracer)

    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        waiting = deque(requests)
        while waiting:
            reqs: list[Req] = []
            try:
                while waiting and (req := self._admit(waiting[0], reqs)):  # prefill, each prompt by itself
                    reqs.append(req)
                    self.tracer.phase(None, "prefill", req.uid)
                    waiting.popleft()
                    yield from self._step([req], num_decode=0)
                while running := [req for req in reqs if req.finish_reason is None]:
                    yield from self._step(running, num_decode=len(running))
            finally:  # also when the caller closes the generator half-way
                with self.manager.freeing():
                    for req in reqs:
                        if req.finish_reason is None:
                            self.manager.cache_req(req, finished=True)

    def _step(self, reqs: list[Req], num_decode: int) -> list[TokenOutput]:
        """One forward pass: pages for its tokens, the tokens themselves, and what was sampled after them."""
        batch = Batch(reqs, num_decode)
        with self.tracer.span(batch.phase, "engine", tokens=batch.num_tokens, requests=batch.size):
            self.manager.allocate(reqs)
            self.engine.prepare(batch)
            ids = torch.cat([req.input_ids[req.cached_len : req.device_len] for req in reqs])  # [tokens]
            batch.input_ids = ids.to(self.engine.device)
            args = self.engine.sampler.prepare(reqs, self.tokenizer.eos_ids)
            output = self.engine.forward_batch(batch, args)
            output.copy_done.synchronize()
        with self.manager.freeing():
            return [self._commit(req, int(token)) for req, token in zip(reqs, output.next_tokens_host, strict=True)]

    def _commit(self, req: Req, token_id: int) -> TokenOutput:
        req.complete_one()
        req.append_host(token_id, self.tokenizer.eos_ids)
        if req.output_len == 1:
            self.tracer.phase("prefill", "decode", req.uid)
        if req.finish_reason:
            self.tracer.phase("decode", None, req.uid)
        if req.finish_reason or req.output_len == 1:
            self.manager.cache_req(req, finished=req.finish_reason is not None)
        return TokenOutput(req.uid, token_id, req.finish_reason, req.cached_tokens)

    def _admit(self, request: Request, reqs: list[Req]) -> Req | None:
        """The request in the next row, its cached prefix in place. None when there is no row for it, or not room for
        all that it and those before it may ever need."""
        if len(reqs) == self.table.dummy_row:
            return None
        ids = torch.tensor(request.prompt_ids, dtype=torch.int32)
        handle = self.manager.match_req(ids)
        req = Req(request.uid, ids, request.sampling_params, len(reqs), handle.cached_len, handle)
        self.manager.lock(handle)  # before counting: what it covers can no longer be evicted for others
        if self._pages_to_come([*reqs, req]) * self.table.page_size > self.manager.available_size:
            self.manager.unlock(handle)
            return None
        self.table.set_prefix(req.table_idx, handle.slots())
        return req

    def _pages_to_come(self, reqs: list[Req]) -> int:
        """Pages that unfinished requests may still ask for."""
        size = self.table.page_size
        running = [req for req in reqs if req.finish_reason is None]
        return sum(max_pages(req.prompt_len, req.sampling_params, size) - -(-req.cached_len // size) for req in running)

    def _check(self, prompt: str | Sequence[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        ids, params = super()._check(prompt, params)
        check_fits(len(ids), params, self.table.page_size, self.manager.num_pages)
        return ids, params

    def stats(self) -> dict[str, int]:
        self._check_open()
        return self.manager.stats()
