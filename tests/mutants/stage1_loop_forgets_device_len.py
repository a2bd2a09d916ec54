"""1.5: does not count the new token."""

from __future__ import annotations

from collections.abc import Generator

import torch

from minisgl.core.llm import Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import Req
from minisgl.stage1.llm import LLM

kills = "tests/exercises/test_stage1.py::test_a_seeded_draw_knows_its_position"
words = "device_len before each step"


class MyLLM(LLM):
    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        for request in requests:
            ids = torch.tensor(request.prompt_ids, dtype=torch.int32)
            req = Req(request.uid, ids, request.sampling_params, table_idx=0)
            while req.finish_reason is None:
                with self.tracer.span("forward", "engine", req.uid, tokens=req.device_len):
                    token_id = self._next_token(req)
                req.append_host(token_id, self.tokenizer.eos_ids)
                yield TokenOutput(req.uid, token_id, req.finish_reason, cached_tokens=0)
