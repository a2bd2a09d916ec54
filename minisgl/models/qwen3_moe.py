"""Qwen 3 with experts: Qwen 3's attention, and in each layer several MLPs of which a token uses a few."""

from __future__ import annotations

from minisgl.core.protocols import Communicator
from minisgl.models.blocks import CausalLM, DecoderLayer, RopeAttention
from minisgl.models.config import ModelConfig
from minisgl.moe.layer import MoELayer


class Qwen3MoeForCausalLM(CausalLM):
    def decoder_layer(self, config: ModelConfig, layer_id: int, comm: Communicator) -> DecoderLayer:
        bias = config.attention_bias
        attention = RopeAttention(config, layer_id, comm, qkv_bias=bias, o_bias=bias, qk_norm=True)
        return DecoderLayer(config, attention, MoELayer(config, comm))
