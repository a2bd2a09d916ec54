"""2.3: positions begin at 0 in each step."""

from __future__ import annotations

import torch

from minisgl.core.context import Context
from minisgl.core.req import Req
from minisgl.stage2.llm import LLM

kills = "tests/exercises/test_stage2.py::test_a_decode_step_computes_one_token_at_its_position"
words = "positions of the step are [4]"


class MyLLM(LLM):
    def _context(self, req: Req) -> Context:
        positions = torch.arange(req.extend_len, device=self.device)  # [tokens]
        return Context(
            input_ids=req.input_ids[req.cached_len : req.device_len].to(self.device),
            positions=positions,
            logits_rows=torch.tensor([req.extend_len - 1], device=self.device),  # [1]
            attention=self.attention,
            kv_cache=self.cache,
            out_loc=positions.int(),
        )
