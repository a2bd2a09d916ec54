"""2.2: has no mask."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minisgl.attention.contiguous import ContiguousAttention

kills = "tests/exercises/test_stage2.py::test_new_tokens_do_not_see_each_others_future"
words = "not the future"


class MyContiguousAttention(ContiguousAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, q_heads, head_dim = q.shape
        kv_heads = k.shape[1]
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, kv, m, dim]
        if n == 1:
            # The last token sees everything, so its heads can stand where tokens do: K is read once for each group.
            q = q.view(1, kv_heads, q_heads // kv_heads, head_dim)  # [1, kv, group, dim]
            return scaled_dot_product_attention(q, k, v).reshape(1, q_heads, head_dim)
        mask = None
        q = q.transpose(0, 1)[None]  # [1, q_heads, n, dim]
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=False, enable_gqa=True)
        return out[0].transpose(0, 1)
