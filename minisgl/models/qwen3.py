"""Qwen 3: Llama with every head of q and k normalised before it is turned, and a head_dim of its own."""

from __future__ import annotations

from minisgl.core.protocols import Communicator
from minisgl.models.blocks import CausalLM, DecoderLayer, GatedMLP, RopeAttention
from minisgl.models.config import ModelConfig


class Qwen3ForCausalLM(CausalLM):
    def decoder_layer(self, config: ModelConfig, layer_id: int, comm: Communicator) -> DecoderLayer:
        bias = config.attention_bias
        attention = RopeAttention(config, layer_id, comm, qkv_bias=bias, o_bias=bias, qk_norm=True)
        return DecoderLayer(config, attention, GatedMLP(config, comm))
