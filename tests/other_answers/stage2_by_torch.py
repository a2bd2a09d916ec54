"""Stage 2 with slices and torch's own functions; a mask by comparison, positions in int32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.attention.contiguous import ContiguousAttention
from minisgl.core.context import Context
from minisgl.core.req import Req
from minisgl.models.config import ModelConfig
from minisgl.stage2.contiguous_cache import ContiguousCache
from minisgl.stage2.llm import LLM


class MyContiguousCache(ContiguousCache):
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        first = int(out_loc[0])
        self.k_cache(layer_id)[first : first + len(k)] = k
        self.v_cache(layer_id)[first : first + len(v)] = v

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        return torch.empty(2, config.num_layers, config.num_kv_heads, config.head_dim, dtype=dtype).nbytes


class MyContiguousAttention(ContiguousAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.causal_mask(len(q), len(k), q.device)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    def causal_mask(self, n: int, m: int, device: torch.device) -> Tensor:
        queries, keys = torch.arange(m - n, m, device=device), torch.arange(m, device=device)
        return keys <= queries[:, None]


class MyLLM(LLM):
    def _context(self, req: Req) -> Context:
        where = torch.arange(req.cached_len, req.device_len, dtype=torch.int32, device=self.device)
        last = torch.full((1,), len(where) - 1, device=self.device)
        ids = req.input_ids[-len(where) :].to(self.device)
        return Context(ids, where, last, self.attention, kv_cache=self.cache, out_loc=where)
