"""Fast kernels for a model that is loaded: which layer's arithmetic each of them does. Knows no engine.

A layer's own methods are the reference, and what a CPU runs. On a GPU a decode step of them is launches more than
work (a norm alone is eight), so here single objects get one kernel in their place; the classes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.core.context import Context
from minisgl.core.protocols import AttentionBackend
from minisgl.kernel.triton_runs import triton_runs
from minisgl.layers.activation import SiluAndMul
from minisgl.layers.embedding import VocabParallelEmbedding
from minisgl.layers.linear import LinearRowParallel, LocalLinear
from minisgl.layers.norm import RMSNorm, RMSNormFused
from minisgl.layers.rotary import RotaryEmbedding, Rotation
from minisgl.models.blocks import CausalLM, DecoderLayer, GatedMLP, RopeAttention
from minisgl.models.fuse_linear import fast_product, halves, is_better_halved
from minisgl.moe.layer import MoELayer


def fuse(model: CausalLM, attention: AttentionBackend, device: torch.device) -> bool:
    """Returns whether fast kernels run here. attention: the backend that the model will be called with."""
    if not triton_runs(device) or not layers_are_ours():
        return False
    from minisgl.kernel.triton_norm import add_rms_norm, rms_norm, silu_and_mul

    kernels: dict[type[nn.Module], Callable[..., Any]] = {
        RMSNorm: lambda norm, x: rms_norm(x, norm.weight, norm.eps),
        RMSNormFused: lambda norm, x, residual: add_rms_norm(x, residual, norm.weight, norm.eps),
        SiluAndMul: lambda gate, gate_up: silu_and_mul(gate_up),
    }
    for module in model.modules():
        if type(module) in kernels:
            _replace(module, "forward", partial(kernels[type(module)], module))
        elif isinstance(module, LocalLinear):
            _replace(module, "product", fast_product(module))
        elif isinstance(module, DecoderLayer) and _is_plain(module):
            _replace(module, "forward", partial(_layer, module))
        elif isinstance(module, VocabParallelEmbedding) and _is_ours(type(module).forward):
            _replace(module, "forward", partial(_embed, module))
    for layer in _summed_by_a_norm(model):
        if layer.comm.size == 1 and is_better_halved(layer):
            _replace(layer, "product", halves(layer))
    if hasattr(attention, "attend_cached"):
        rotary = model.model.rotary_emb
        for module in model.modules():
            if isinstance(module, RopeAttention):
                _replace(module, "attend", partial(_attend, module, rotary.table))
        _replace(rotary, "forward", lambda positions: None)  # its table is read where it is used
    return True


def _summed_by_a_norm(model: CausalLM) -> Iterator[LinearRowParallel]:
    """The layers whose results go straight to an `add_rms_norm`, which takes them in parts too. The last attention's do
    not: of its results only the wanted rows go on."""
    layers = list(model.model.layers)
    for layer in layers:
        if type(layer.self_attn) is RopeAttention and layer is not layers[-1]:
            yield layer.self_attn.o_proj
        if type(layer.mlp) is GatedMLP:
            yield layer.mlp.down_proj


def layers_are_ours() -> bool:
    """Whether what the kernels stand in for is what the package defines. A method that a learner's took the place of
    is to be called, not bypassed."""
    methods = (RMSNorm.forward, RMSNormFused.forward, SiluAndMul.forward, Rotation.apply, RotaryEmbedding.forward)
    return all(_is_ours(method) for method in methods)


def _is_ours(method: Any) -> bool:
    return method.__module__.startswith("minisgl.layers.")


def _embed(layer: VocabParallelEmbedding, input_ids: Tensor) -> Tensor:
    """As `VocabParallelEmbedding.forward`. Of one rank of several it is one kernel instead of seven."""
    from minisgl.kernel.triton_rows import gather_rows

    return layer.comm.all_reduce(gather_rows(layer.weight, input_ids, layer.vocab_range.start))


def _attend(layer: RopeAttention, table: Tensor, heads: Tensor, ctx: Context) -> Tensor:
    """As `RopeAttention.attend`: norm, RoPE and the stores in one kernel, then the attention over the cache."""
    from minisgl.kernel.triton_rope import norm_rope_store

    assert ctx.kv_cache is not None  # backends with attend_cached have one
    assert ctx.out_loc is not None
    q_norm, k_norm = layer.q_norm, layer.k_norm
    weights = (q_norm.weight, k_norm.weight) if q_norm is not None and k_norm is not None else None
    k_cache, v_cache = ctx.kv_cache.k_cache(layer.layer_id), ctx.kv_cache.v_cache(layer.layer_id)
    eps = q_norm.eps if q_norm is not None else 0.0
    q = norm_rope_store(heads, layer.num_heads, weights, eps, table, ctx.positions, k_cache, v_cache, ctx.out_loc)
    return ctx.attention.attend_cached(q, layer.layer_id, ctx)  # type: ignore[attr-defined]


def _is_plain(layer: DecoderLayer) -> bool:
    """Whether `_layer` computes what this layer does."""
    from minisgl.kernel.triton_linear import MOST_NORMED

    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not RopeAttention or attention.qkv_proj.bias is not None:
        return False
    if attention.qkv_proj.weight.shape[1] > MOST_NORMED:
        return False
    if isinstance(mlp, MoELayer):
        return True
    return type(mlp) is GatedMLP and type(mlp.gate) is SiluAndMul and mlp.gate_up_proj.bias is None


def _layer(
    layer: DecoderLayer, x: Tensor, residual: Tensor | None, ctx: Context, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `DecoderLayer.forward`; one row takes both norms, the gate and the products around them in two kernels. A norm
    before experts stays alone: the router is not all that reads it."""
    from minisgl.kernel.triton_linear import norm_gemv

    if len(x) != 1 or residual is None or rows is not None:
        return DecoderLayer.forward(layer, x, residual, ctx, rows)
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention, RopeAttention)  # _is_plain
    norm = layer.input_layernorm
    heads, residual = norm_gemv(x, residual, norm.weight, norm.eps, attention.qkv_proj.weight)
    x = attention.o_proj(attention.attend(heads.view(1, -1, attention.head_dim), ctx).flatten(1))
    norm = layer.post_attention_layernorm
    if not isinstance(mlp, GatedMLP):
        x, residual = norm(x, residual)
        return mlp(x), residual
    gated, residual = norm_gemv(x, residual, norm.weight, norm.eps, mlp.gate_up_proj.weight, silu=True)
    return mlp.down_proj(gated), residual


def _replace(module: nn.Module, method: str, kernel: Callable[..., Any]) -> None:
    setattr(module, method, kernel)
