"""The naive loop: forward the whole sequence, sample, append, repeat. Knows no cache and no batch."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from minisgl.attention.recompute import RecomputeAttention
from minisgl.core.context import Context
from minisgl.core.llm import BaseLLM, Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import Req
from minisgl.core.threads import set_threads
from minisgl.kernel.device import resolve_device, resolve_dtype
from minisgl.learn import exercise
from minisgl.models.load import load_model
from minisgl.sampling.sampler import Sampler


class LLM(BaseLLM):
    def _start(self) -> None:
        set_threads(self.config.threads)
        self.device = resolve_device(self.config.device)
        dtype = resolve_dtype(self.config.dtype, self.device)
        self.model = load_model(
            self.folder, self.model_config, self.max_seq_len, self.device, dtype, self.config.dummy_weight
        )
        self.attention = RecomputeAttention()
        self.sampler = Sampler(self.model_config.vocab_size, self.device)

    @exercise("1.5")
    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        """One request after the other, one token after the other. Each token is yielded as soon as it is there, as a
        TokenOutput with the request's uid, its finish_reason so far, and no cached tokens.

        A Req is made of each request, in row 0. While it has no finish_reason, `_next_token` gives the token after all
        that it holds; `append_host` notes it, and says whether it is the last; `device_len` counts it.
        """
        for request in requests:
            ids = torch.tensor(request.prompt_ids, dtype=torch.int32)
            req = Req(request.uid, ids, request.sampling_params, table_idx=0)
            while req.finish_reason is None:
                with self.tracer.span("forward", "engine", req.uid, tokens=req.device_len):
                    token_id = self._next_token(req)
                req.append_host(token_id, self.tokenizer.eos_ids)
                req.device_len += 1  # cached_len stays 0: nothing is kept, so all of it is computed again
                yield TokenOutput(req.uid, token_id, req.finish_reason, cached_tokens=0)

    @torch.inference_mode()
    def _next_token(self, req: Req) -> int:
        logits = self.model(self._context(req.input_ids))  # [1, vocab]
        return int(self.sampler.sample(logits, self.sampler.prepare([req], self.tokenizer.eos_ids)))

    def _context(self, input_ids: Tensor) -> Context:
        """input_ids: int32 [tokens]. Only the last token's logits are wanted."""
        tokens = len(input_ids)
        return Context(
            input_ids=input_ids.to(self.device),
            positions=torch.arange(tokens, device=self.device),  # [tokens]
            logits_rows=torch.tensor([tokens - 1], device=self.device),  # [1]
            attention=self.attention,
        )
