"""Stage 2 in small steps: one token, one query, one line at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl.attention.contiguous import ContiguousAttention
from minisgl.core.context import Context
from minisgl.core.req import Req
from minisgl.models.config import ModelConfig
from minisgl.stage2.contiguous_cache import ContiguousCache
from minisgl.stage2.llm import LLM


class MyContiguousCache(ContiguousCache):
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        for i, slot in enumerate(out_loc.tolist()):
            self.k_cache(layer_id)[slot].copy_(k[i])
            self.v_cache(layer_id)[slot].copy_(v[i])

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        one_layer = (config.num_kv_heads + config.num_kv_heads) * config.head_dim
        return config.num_layers * one_layer * torch.empty((), dtype=dtype).element_size()


class MyContiguousAttention(ContiguousAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(group, dim=1).float(), v.repeat_interleave(group, dim=1).float()
        rows = []
        for i in range(len(q)):
            seen = len(k) - len(q) + i + 1
            scores = torch.einsum("hd,mhd->hm", q[i].float(), keys[:seen]) / math.sqrt(q.shape[2])
            rows.append(torch.einsum("hm,mhd->hd", scores.softmax(-1), values[:seen]))
        return torch.stack(rows).to(q.dtype)

    def causal_mask(self, n: int, m: int, device: torch.device) -> Tensor:
        mask = torch.zeros(n, m, dtype=torch.bool, device=device)
        for i in range(n):
            mask[i, : m - n + i + 1] = True
        return mask


class MyLLM(LLM):
    def _context(self, req: Req) -> Context:
        new = list(range(req.cached_len, req.device_len))
        return Context(
            input_ids=torch.tensor([int(req.input_ids[i]) for i in new], dtype=torch.int32, device=self.device),
            positions=torch.tensor(new, device=self.device),
            logits_rows=torch.tensor([len(new) - 1], device=self.device),
            attention=self.attention,
            kv_cache=self.cache,
            out_loc=torch.tensor(new, dtype=torch.int32, device=self.device),
        )
