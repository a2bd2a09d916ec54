"""The loop over a static batch: prefill a group, decode it together until its last member ends, take the next group.

Knows nothing of prefixes in common; a request that ends early leaves its place empty (stage 5 fills it).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch

from minisgl.core.batch import Batch
from minisgl.core.llm import BaseLLM, Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage3.config import EngineConfig
from minisgl.stage3.engine import Engine
from minisgl.stage3.page_count import check_fits, max_pages
from minisgl.stage3.page_pool import PageAllocator


class LLM(BaseLLM):
    config: EngineConfig
    config_class = EngineConfig

    def _start(self) -> None:
        self.engine = Engine(self.config, self.folder, self.model_config, self.max_seq_len)
        self.table = self.engine.table
        self.allocator = PageAllocator(self.engine.pool.num_pages)

    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        for group in self._groups(requests):
            reqs = [_new_req(request, row) for row, request in enumerate(group)]
            try:
                for req in reqs:  # prefill, each prompt by itself
                    self.tracer.phase(None, "prefill", req.uid)
                    yield from self._step([req], num_decode=0)
                while running := [req for req in reqs if req.finish_reason is None]:
                    yield from self._step(running, num_decode=len(running))
            finally:  # also when the caller closes the generator half-way
                for req in reqs:
                    self._free(req)

    def _step(self, reqs: list[Req], num_decode: int) -> list[TokenOutput]:
        """One forward pass: pages for its tokens, the tokens themselves, and what was sampled after them."""
        batch = Batch(reqs, num_decode)
        with self.tracer.span(batch.phase, "engine", tokens=batch.num_tokens, requests=batch.size):
            self.table.assign(reqs, self.allocator.allocate(sum(map(self.table.pages_needed, reqs))))
            for req in reqs:
                self.table.trace_row(self.tracer, req, 0, req.device_len)
            self.engine.prepare(batch)
            ids = torch.cat([req.input_ids[req.cached_len : req.device_len] for req in reqs])  # [tokens]
            batch.input_ids = ids.to(self.engine.device)
            args = self.engine.sampler.prepare(reqs, self.tokenizer.eos_ids)
            for req in reqs:
                req.complete_one()  # before the forward: should it raise, the new pages are known to be the request's
            output = self.engine.forward_batch(batch, args)
            output.copy_done.synchronize()
        free = self.allocator.num_free
        self.tracer.counter("pages", free=free, rows=self.allocator.num_pages - free)
        return [self._commit(req, int(token)) for req, token in zip(reqs, output.next_tokens_host, strict=True)]

    def _commit(self, req: Req, token_id: int) -> TokenOutput:
        req.append_host(token_id, self.tokenizer.eos_ids)
        if req.output_len == 1:
            self.tracer.phase("prefill", "decode", req.uid)
        if req.finish_reason:
            self.tracer.phase("decode", None, req.uid)
            self._free(req)
        return TokenOutput(req.uid, token_id, req.finish_reason, cached_tokens=0)

    def _free(self, req: Req) -> None:
        """Give the request's pages back, once."""
        pages = self.table.pages(req.table_idx, 0, req.cached_len)
        self.allocator.free(pages)
        req.cached_len = 0
        if self.tracer.enabled:
            self.table.trace_row(self.tracer, req, 0, 0)
            self.tracer.instant("free_pages", "cache", pages=pages.tolist())

    def _groups(self, requests: list[Request]) -> Iterator[list[Request]]:
        """As many requests at a time as there are rows, and pages for all that they may ever need."""
        group: list[Request] = []
        pages = 0
        for request in requests:
            more = max_pages(len(request.prompt_ids), request.sampling_params, self.table.page_size)
            if group and (len(group) == self.table.dummy_row or pages + more > self.allocator.num_pages):
                yield group
                group, pages = [], 0
            group.append(request)
            pages += more
        if group:
            yield group

    def _check(self, prompt: str | Sequence[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        ids, params = super()._check(prompt, params)
        check_fits(len(ids), params, self.table.page_size, self.allocator.num_pages)
        return ids, params

    def stats(self) -> dict[str, int]:
        self._check_open()
        return {"pages_total": self.allocator.num_pages, "pages_free": self.allocator.num_free}


def _new_req(request: Request, row: int) -> Req:
    return Req(request.uid, torch.tensor(request.prompt_ids, dtype=torch.int32), request.sampling_params, row)
