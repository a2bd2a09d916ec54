"""What stands between a layer's qkv projection and its attention, as one Triton kernel: norm of each head of q and k,
RoPE, and K and V to their slots of the cache. Knows no pages, only slots.

Three to five kernels and as many trips of q and k through memory become one. vLLM and TensorRT-LLM fuse likewise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton_runs import launches_early


def norm_rope_store(
    heads: Tensor,
    num_q_heads: int,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    table: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_loc: Tensor,
) -> Tensor:
    """heads: [tokens, q + k + v heads, head_dim], contiguous. weights: of q's and k's norm, [head_dim] each; None: no
    norm. table: [max_seq_len, head_dim], cos then sin. positions: int64 [tokens]. k_cache, v_cache: [slots, kv_heads,
    head_dim], written at out_loc, int32 [tokens]. Returns q, [tokens, q heads, head_dim]."""
    tokens, num_heads, head_dim = heads.shape
    q = torch.empty((tokens, num_q_heads, head_dim), dtype=heads.dtype, device=heads.device)
    q_weight, k_weight = weights or (table, table)  # not read without a norm
    half = triton.next_power_of_2(head_dim // 2)
    (heads_each, warps), pdl = _tile(tokens), launches_early(heads.device)
    grid = (tokens, triton.cdiv(num_heads, heads_each))
    _norm_rope_store[grid](
        heads, q, q_weight, k_weight, eps, table, positions, k_cache, v_cache, out_loc, num_q_heads, k_cache.shape[1],
        head_dim // 2, weights is not None, heads_each, half, pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return q


def _tile(tokens: int) -> tuple[int, int]:
    """Heads a program, and its warps."""
    return (8, 4) if tokens < 512 else (16, 4)


@triton.jit
def _norm_rope_store(
    heads, q_out, q_weight, k_weight, eps, table, positions, k_cache, v_cache, out_loc, q_heads, kv_heads,
    half_dim, NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    pair = tl.arange(0, HALF)[None, :]  # [1, HALF]
    is_q, is_v = head < q_heads, head >= q_heads + kv_heads
    inside = (head < q_heads + 2 * kv_heads) & (pair < half_dim)
    dim = 2 * half_dim
    source = heads + (token * (q_heads + 2 * kv_heads) + head) * dim + pair
    a = tl.load(source, mask=inside, other=0).to(tl.float32)
    b = tl.load(source + half_dim, mask=inside, other=0).to(tl.float32)
    kind = q_out.dtype.element_ty
    x, y = a, b
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / dim + eps)[:, None]
        weight = tl.where(is_q, q_weight, k_weight) + pair
        first = tl.load(weight, mask=inside, other=0).to(tl.float32)
        second = tl.load(weight + half_dim, mask=inside, other=0).to(tl.float32)
        x = ((a * scale).to(kind).to(tl.float32) * first).to(kind).to(tl.float32)
        y = ((b * scale).to(kind).to(tl.float32) * second).to(kind).to(tl.float32)
    angle = table + tl.load(positions + token) * dim + pair
    cos = tl.load(angle, mask=pair < half_dim, other=0).to(tl.float32)
    sin = tl.load(angle + half_dim, mask=pair < half_dim, other=0).to(tl.float32)
    first_out = tl.where(is_v, a, x * cos - y * sin)
    second_out = tl.where(is_v, b, y * cos + x * sin)
    slot = tl.load(out_loc + token).to(tl.int64)
    in_q = q_out + (token * q_heads + head) * dim
    in_k = k_cache + (slot * kv_heads + head - q_heads) * dim
    in_v = v_cache + (slot * kv_heads + head - q_heads - kv_heads) * dim
    place = tl.where(is_q, in_q, tl.where(is_v, in_v, in_k)) + pair
    tl.store(place, first_out, mask=inside)
    tl.store(place + half_dim, second_out, mask=inside)
