"""Qwen 2 and 2.5: Llama with biases on q, k and v, and none on the output, whatever the config says."""

from __future__ import annotations

from minisgl.core.protocols import Communicator
from minisgl.models.blocks import CausalLM, DecoderLayer, GatedMLP, RopeAttention
from minisgl.models.config import ModelConfig


class Qwen2ForCausalLM(CausalLM):
    def decoder_layer(self, config: ModelConfig, layer_id: int, comm: Communicator) -> DecoderLayer:
        return DecoderLayer(config, RopeAttention(config, layer_id, comm, qkv_bias=True), GatedMLP(config, comm))
