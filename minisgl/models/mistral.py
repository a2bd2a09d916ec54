"""Mistral without its sliding window: Llama with no biases. Later releases (0.2, Nemo, Small) have no window."""

from __future__ import annotations

from minisgl.core.protocols import Communicator
from minisgl.models.blocks import CausalLM, DecoderLayer, GatedMLP, RopeAttention
from minisgl.models.config import ModelConfig


class MistralForCausalLM(CausalLM):
    def decoder_layer(self, config: ModelConfig, layer_id: int, comm: Communicator) -> DecoderLayer:
        return DecoderLayer(config, RopeAttention(config, layer_id, comm), GatedMLP(config, comm))
