"""Stage 1 as somebody writes it who knows torch well: its own functions, complex numbers, no loop over rows."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor
from torch.nn import functional as F

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
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


class MyRotation(Rotation):
    def apply(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turn = torch.complex(self.cos[..., :half], self.signed_sin[..., half:])
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)


class MyRecomputeAttention(RecomputeAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


class MyTokenFilters(TokenFilters):
    def top_k_threshold(self, ranked: Tensor, top_k: Tensor) -> Tensor:
        padded = F.pad(ranked, (0, 1), value=-torch.inf)
        return padded[torch.arange(len(ranked)), (top_k - 1).clamp(max=ranked.shape[1])][:, None]

    def top_p_threshold(self, ranked: Tensor, log_total: Tensor, top_p: Tensor) -> Tensor:
        above = F.pad((ranked - log_total).exp().cumsum(1), (1, -1))
        staying = (above < top_p[:, None]).sum(dim=1, keepdim=True).clamp(min=1)
        return torch.where(top_p[:, None] >= 1, -torch.inf, ranked.gather(1, staying - 1))


class MyLLM(LLM):
    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        reqs = [Req(r.uid, torch.tensor(r.prompt_ids, dtype=torch.int32), r.sampling_params, 0) for r in requests]
        for req in reqs:
            while not req.finish_reason:
                token = self._next_token(req)
                req.append_host(token, self.tokenizer.eos_ids)
                req.device_len += 1
                yield TokenOutput(uid=req.uid, token_id=token, finish_reason=req.finish_reason, cached_tokens=0)
