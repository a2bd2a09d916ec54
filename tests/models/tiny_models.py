"""Tiny random models of every architecture, made and judged by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from minisgl.attention.recompute import RecomputeAttention
from minisgl.core.context import Context

SHAPE = {
    "vocab_size": 101,  # prime: no number of ranks divides it
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {"head_dim": 16, **MOE},
}


def make_folder(folder: Path, family: str, **changes: Any) -> torch.nn.Module:
    """Save a random model in the folder; no weight is left at zero or one. Returns transformers' model."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **VARIANTS[family], **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def rewrite_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@torch.inference_mode()
def logits(model: torch.nn.Module, ids: list[int], rows: list[int] | None = None) -> Tensor:
    """Our logits for one whole prompt, [rows, vocab]."""
    tokens = torch.tensor(ids, dtype=torch.int32)
    wanted = None if rows is None else torch.tensor(rows)
    return model(Context(tokens, torch.arange(len(ids)), wanted, RecomputeAttention()))


@torch.inference_mode()
def expected_logits(model: torch.nn.Module, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0]
