"""Architecture names to classes, and a model built without memory. Loads no weights."""

from __future__ import annotations

import torch

from minisgl.core.protocols import Communicator
from minisgl.layers.rotary import RotaryEmbedding
from minisgl.models.blocks import CausalLM
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.mistral import MistralForCausalLM
from minisgl.models.qwen2 import Qwen2ForCausalLM
from minisgl.models.qwen3 import Qwen3ForCausalLM
from minisgl.models.qwen3_moe import Qwen3MoeForCausalLM

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def create_model(
    config: ModelConfig, comm: Communicator, max_seq_len: int, dtype: torch.dtype, device: torch.device
) -> CausalLM:
    """The rank's share of the model, its parameters on meta: shapes and dtype, no memory. The RoPE table, long
    enough for max_seq_len positions, is on the device."""
    rotary = RotaryEmbedding(config.rope, config.head_dim, max_seq_len, dtype, device)
    with torch.device("meta"):
        model = ARCHITECTURES[config.architecture](config, comm, rotary)
    return model.to(dtype).requires_grad_(False)
