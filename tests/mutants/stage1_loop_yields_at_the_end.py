"""1.5: collects all tokens and yields them at the end."""

from __future__ import annotations

from collections.abc import Generator

import torch

from minisgl.core.llm import Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import Req
from minisgl.stage1.llm import LLM

kills = "tests/exercises/test_stage1.py::test_the_loop_yields_each_token_when_it_is_there"
words = "only when all were made"


class MyLLM(LLM):
    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        outputs = []
        for request in requests:
            ids = torch.tensor(request.prompt_ids, dtype=torch.int32)
            req = Req(request.uid, ids, request.sampling_params, table_idx=0)
            while req.finish_reason is None:
                with self.tracer.span("forward", "engine", req.uid, tokens=req.device_len):
                    token_id = self._next_token(req)
                req.append_host(token_id, self.tokenizer.eos_ids)
                req.device_len += 1  # cached_len stays 0: nothing is kept, so all of it is computed again
                outputs.append(TokenOutput(req.uid, token_id, req.finish_reason, cached_tokens=0))
        yield from outputs
