"""What all model files share: attention with RoPE, the MLP, a decoder layer, the stack. A file adds its differences.

Names are Hugging Face's, but for the merged projections (qkv_proj, gate_up_proj).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from minisgl.core.context import Context
from minisgl.core.protocols import Communicator
from minisgl.layers.activation import create_gate
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import LinearColParallelMerged, LinearOProj, LinearQKVMerged, LinearRowParallel
from minisgl.layers.norm import RMSNorm, RMSNormFused
from minisgl.layers.rotary import RotaryEmbedding
from minisgl.layers.shard import RankHeads, shard_range
from minisgl.models.config import ModelConfig


class RopeAttention(nn.Module):
    """Grouped-query attention over the rank's heads (Ainslie et al., 2023). The attending is the backend's."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        comm: Communicator,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.head_dim = config.head_dim
        own = RankHeads(config, comm.rank, comm.size)
        self.num_heads, self.num_kv_heads = len(own.q()), len(own.kv())
        self.qkv_proj = LinearQKVMerged(config.hidden_size, config, config.head_dim, qkv_bias, comm)
        self.o_proj = LinearOProj(config, config.head_dim, config.hidden_size, o_bias, comm)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """x: [tokens, hidden]. Returns the same shape."""
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)  # [tokens, q + k + v heads, head_dim]
        return self.o_proj(self.attend(heads, ctx).flatten(1))

    def attend(self, heads: Tensor, ctx: Context) -> Tensor:
        """heads: [tokens, q + k + v heads, head_dim], as projected. Returns [tokens, q heads, head_dim]."""
        assert ctx.rotary is not None  # Decoder.forward gave it
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((self.num_heads, self.num_kv_heads), dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = ctx.rotary.apply(qk).split((self.num_heads, self.num_kv_heads), dim=1)
        return ctx.attention.forward(q, k, v, self.layer_id, ctx)


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig, comm: Communicator, bias: bool = False) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = LinearColParallelMerged(hidden, (size, size), bias, comm)
        self.gate = create_gate(config.hidden_act)
        self.down_proj = LinearRowParallel(len(shard_range(size, comm.rank, comm.size)), hidden, bias, comm)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden]. Returns the same shape."""
        return self.down_proj(self.gate(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNormFused(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNormFused(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, residual: Tensor | None, ctx: Context, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x: [tokens, hidden], still to be added to the residual, as what is returned is. rows: int64 [rows], the
        tokens that are wanted of this layer; None: all. The others' K and V are computed, and nothing more."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, ctx)
        if rows is not None:
            x, residual = x[rows], residual[rows]  # [rows, hidden]
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Ids to normalised hidden states: what checkpoints call `model`."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer], rotary: RotaryEmbedding, comm: Communicator):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, comm)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNormFused(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = rotary

    def forward(self, ctx: Context) -> Tensor:
        """Returns [rows, hidden] for ctx.logits_rows."""
        ctx = dataclasses.replace(ctx, rotary=self.rotary_emb(ctx.positions))
        x, residual = self.embed_tokens(ctx.input_ids), None  # [tokens, hidden]
        *layers, last = self.layers
        for layer in layers:
            x, residual = layer(x, residual, ctx)
        x, residual = last(x, residual, ctx, ctx.logits_rows)
        return self.norm(x, residual)[0]


class CausalLM(nn.Module, ABC):
    """A model as an engine calls it. Subclasses say what one of their decoder layers is."""

    def __init__(self, config: ModelConfig, comm: Communicator, rotary: RotaryEmbedding) -> None:
        super().__init__()
        layers = [self.decoder_layer(config, layer_id, comm) for layer_id in range(config.num_layers)]
        self.model = Decoder(config, layers, rotary, comm)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, comm, tied_to)

    @abstractmethod
    def decoder_layer(self, config: ModelConfig, layer_id: int, comm: Communicator) -> DecoderLayer: ...

    def forward(self, ctx: Context) -> Tensor:
        """Returns this rank's columns of the logits, [rows, local_vocab] for ctx.logits_rows."""
        return self.lm_head(self.model(ctx))
