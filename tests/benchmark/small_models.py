"""The published configurations, scaled down until they run in milliseconds."""

from __future__ import annotations

from typing import Any

SMALL = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 597, "eos_token_id": 599}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def small(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **SMALL, **HEADS, **(EXPERTS if "num_experts" in config else {}), "max_position_embeddings": 512}
