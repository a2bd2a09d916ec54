"""Stage 1 as somebody writes it who takes one small step after the other: loops over rows and heads, halves by name."""

from __future__ import annotations

import math
from collections.abc import Generator

import torch
from torch import Tensor

from minisgl.attention.recompute import RecomputeAttention
from minisgl.core.llm import Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.req import Req
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotation
from minisgl.sampling.filters import TokenFilters
from minisgl.stage1.llm import LLM


class MyRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        rms = torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * (wide / rms).to(x.dtype)


class MyRotation(Rotation):
    def apply(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        cos, sin = self.cos[..., :half], self.signed_sin[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class MyRecomputeAttention(RecomputeAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        for head in range(q.shape[1]):
            for i in range(len(q)):
                keys, values = k[: i + 1, head // group].float(), v[: i + 1, head // group].float()
                scores = keys @ q[i, head].float() / math.sqrt(q.shape[2])
                out[i, head] = (torch.softmax(scores, dim=0) @ values).to(q.dtype)
        return out


class MyTokenFilters(TokenFilters):
    def top_k_threshold(self, ranked: Tensor, top_k: Tensor) -> Tensor:
        rows = [
            row[k - 1].item() if k <= len(row) else -math.inf for row, k in zip(ranked, top_k.tolist(), strict=True)
        ]
        return torch.tensor(rows, dtype=ranked.dtype)[:, None]

    def top_p_threshold(self, ranked: Tensor, log_total: Tensor, top_p: Tensor) -> Tensor:
        thresholds = []
        for row, total, p in zip(ranked, log_total, top_p.tolist(), strict=True):
            held, last = 0.0, -1
            for probability in torch.exp(row - total).tolist():
                if last >= 0 and held >= p:
                    break
                held, last = held + probability, last + 1
            thresholds.append(-math.inf if p >= 1 else row[last].item())
        return torch.tensor(thresholds, dtype=ranked.dtype)[:, None]


class MyLLM(LLM):
    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        for request in requests:
            req = Req(request.uid, torch.tensor(request.prompt_ids).int(), request.sampling_params, 0)
            while True:
                token_id = self._next_token(req)
                reason = req.append_host(token_id, self.tokenizer.eos_ids)
                req.device_len = len(req.input_ids)
                yield TokenOutput(req.uid, token_id, reason, 0)
                if reason is not None:
                    break
