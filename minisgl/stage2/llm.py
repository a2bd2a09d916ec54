"""The loop with a cache: prefill the prompt once, then decode one token a step. One request at a time."""

from __future__ import annotations

import logging
from collections.abc import Generator

import torch

from minisgl.attention.contiguous import ContiguousAttention
from minisgl.core.context import Context
from minisgl.core.llm import BaseLLM, Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import Req
from minisgl.core.threads import set_threads
from minisgl.kernel.device import resolve_device, resolve_dtype
from minisgl.learn import exercise
from minisgl.models.load import load_model
from minisgl.sampling.sampler import Sampler
from minisgl.stage2.contiguous_cache import ContiguousCache

log = logging.getLogger("minisgl")


class LLM(BaseLLM):
    def _start(self) -> None:
        set_threads(self.config.threads)
        self.device = resolve_device(self.config.device)
        dtype = resolve_dtype(self.config.dtype, self.device)
        self.model = load_model(
            self.folder, self.model_config, self.max_seq_len, self.device, dtype, self.config.dummy_weight
        )
        self.attention = ContiguousAttention()
        self.cache = ContiguousCache(self.model_config, self.max_seq_len, dtype, self.device)
        each = self.cache.bytes_per_token(self.model_config, dtype)
        log.info("KV cache: %d tokens of %d bytes, %.2f GiB", self.max_seq_len, each, self.max_seq_len * each / 2**30)
        self.sampler = Sampler(self.model_config.vocab_size, self.device)

    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        """The next request overwrites the cache of the one before: nothing needs to be cleared."""
        for request in requests:
            ids = torch.tensor(request.prompt_ids, dtype=torch.int32)
            req = Req(request.uid, ids, request.sampling_params, table_idx=0)
            while req.finish_reason is None:
                phase = "decode" if req.output_len else "prefill"
                with self.tracer.span(phase, "engine", req.uid, tokens=req.extend_len):
                    token_id = self._next_token(req)
                req.complete_one()
                req.append_host(token_id, self.tokenizer.eos_ids)
                yield TokenOutput(req.uid, token_id, req.finish_reason, cached_tokens=0)

    @torch.inference_mode()
    def _next_token(self, req: Req) -> int:
        logits = self.model(self._context(req))  # [1, vocab]
        return int(self.sampler.sample(logits, self.sampler.prepare([req], self.tokenizer.eos_ids)))

    @exercise("2.3")
    def _context(self, req: Req) -> Context:
        """Only what is not cached: the tokens from cached_len to device_len, whose positions start at cached_len and
        not at 0. Slot n of the cache is for token n. Of the logits only the last token's row is wanted."""
        positions = torch.arange(req.cached_len, req.device_len, device=self.device)  # [tokens]
        return Context(
            input_ids=req.input_ids[req.cached_len : req.device_len].to(self.device),
            positions=positions,
            logits_rows=torch.tensor([req.extend_len - 1], device=self.device),  # [1]
            attention=self.attention,
            kv_cache=self.cache,
            out_loc=positions.int(),
        )
