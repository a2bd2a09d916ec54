"""Llama 2 and 3, and what borrows its shape: SmolLM, Yi, DeepSeek's distillations. Biases where the config says."""

from __future__ import annotations

from minisgl.core.protocols import Communicator
from minisgl.models.blocks import CausalLM, DecoderLayer, GatedMLP, RopeAttention
from minisgl.models.config import ModelConfig


class LlamaForCausalLM(CausalLM):
    def decoder_layer(self, config: ModelConfig, layer_id: int, comm: Communicator) -> DecoderLayer:
        bias = config.attention_bias
        attention = RopeAttention(config, layer_id, comm, qkv_bias=bias, o_bias=bias)
        return DecoderLayer(config, attention, GatedMLP(config, comm, bias=config.mlp_bias))
