"""Experts against a loop over tokens that anyone can check by eye."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from minisgl.core.protocols import NoCommunicator
from minisgl.models.config import ModelConfig
from minisgl.moe.layer import MoELayer

CONFIG = ModelConfig.from_dict(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 12,
        "intermediate_size": 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 5,
    }
)


def make_layer(norm_topk_prob: bool) -> MoELayer:
    layer = MoELayer(dataclasses.replace(CONFIG, norm_topk_prob=norm_topk_prob), NoCommunicator())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer.requires_grad_(False)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_each_token_by_hand(norm_topk_prob: bool, tokens: int) -> None:
    layer, x = make_layer(norm_topk_prob), torch.randn(tokens, 12)
    expected = []
    for token in x:
        probs = F.softmax(layer.gate.weight @ token, dim=0)
        chosen = probs.argsort(descending=True)[:2]
        total = probs[chosen].sum() if norm_topk_prob else 1.0
        terms = []
        for expert in chosen:
            gate, up = (layer.experts.gate_up_proj[expert] @ token).split(5)
            terms.append(probs[expert] / total * (layer.experts.down_proj[expert] @ (F.silu(gate) * up)))
        expected.append(sum(terms))
    torch.testing.assert_close(layer(x), torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_experts_nobody_chose_are_not_read() -> None:
    """With one token four of six experts must not cost anything: they may hold anything."""
    layer, x = make_layer(False), torch.randn(1, 12)
    before = layer(x)
    _, chosen = layer.route(x)
    for expert in set(range(6)) - set(chosen[0].tolist()):
        layer.experts.gate_up_proj[expert] = torch.nan
        layer.experts.down_proj[expert] = torch.nan
    assert torch.equal(layer(x), before)


def test_the_weights_are_float32_before_they_are_rounded() -> None:
    """Once, at the end."""
    layer, x = make_layer(True).bfloat16(), torch.randn(30, 12, dtype=torch.bfloat16)
    weights, expert_ids = layer.route(x)
    probs, expected_ids = F.softmax(layer.gate(x).float(), dim=-1).topk(2)
    assert torch.equal(expert_ids, expected_ids)
    assert torch.equal(weights, (probs / probs.sum(-1, keepdim=True)).bfloat16())
