"""Every architecture and every kind of RoPE gives transformers' logits, from a folder transformers wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import expected_logits, logits, make_folder
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minisgl.core.protocols import NoCommunicator
from minisgl.layers.rotary import RotaryEmbedding
from minisgl.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from minisgl.models.load import load_model
from minisgl.models.registry import ARCHITECTURES, create_model

IDS = [5, 100, 0, 17, 17, 3, 64, 99, 41, 8, 77, 23, 50]
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with its attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.7,
        "beta_fast": 12.0,
        "beta_slow": 0.5,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn, no rounding": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Llama", {"num_key_value_heads": 6}),
    ("Llama", {"num_key_value_heads": 1, "head_dim": 10}),
    ("Llama", {"hidden_act": "gelu"}),
    ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("Llama", {"hidden_act": "gelu_new"}),
    ("Llama", {"rope_theta": 500.0}),
    ("Mistral", {}),
    ("Mistral", {"head_dim": 12}),
    ("Qwen2", {}),
    ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    ("Qwen3", {}),
    ("Qwen3", {"attention_bias": True}),
    ("Qwen3Moe", {}),
    ("Qwen3Moe", {"norm_topk_prob": False}),
    *(("Llama", {"rope_scaling": rope, "rope_theta": 700.0}) for rope in ROPES.values()),
    *(("Qwen3", {"rope_scaling": rope}) for rope in ROPES.values()),
]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda value: str(value).replace("_embeddings", ""))
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    oracle = make_folder(tmp_path, family, **changes)
    config = ModelConfig.from_folder(tmp_path)
    model = load_model(tmp_path, config, 64, torch.device("cpu"), torch.float32)
    expected = expected_logits(oracle, IDS)
    assert expected.std() > 0.1, "a model that answers nothing in particular cannot fail this test"
    torch.testing.assert_close(logits(model, IDS), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_only_wanted_rows_come_back_in_order(tmp_path: Path, family: str) -> None:
    make_folder(tmp_path, family)
    model = load_model(tmp_path, ModelConfig.from_folder(tmp_path), 64, torch.device("cpu"), torch.float32)
    whole = logits(model, IDS)
    torch.testing.assert_close(logits(model, IDS, rows=[12, 4]), whole[[12, 4]], atol=1e-5, rtol=0)


def test_the_last_mlp_computes_only_wanted_rows(tmp_path: Path) -> None:
    make_folder(tmp_path, "Llama")
    model = load_model(tmp_path, ModelConfig.from_folder(tmp_path), 64, torch.device("cpu"), torch.float32)
    seen: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    logits(model, IDS, rows=[12, 4])
    logits(model, IDS)
    assert seen == [len(IDS), 2, len(IDS), len(IDS)]


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_table_to_its_end(kind: str) -> None:
    """Small angles hide a wrong frequency: compare cos and sin far out too."""
    theirs_config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=128, rope_scaling=dict(ROPES[kind])
    )
    config = ModelConfig.from_dict({**theirs_config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    positions = torch.tensor([0, 1, 31, 32, 127, 4095])
    cos, sin = LlamaRotaryEmbedding(theirs_config)(torch.ones(1), positions[None])
    ours = RotaryEmbedding(config.rope, 64, 4096, torch.float32, torch.device("cpu"))(positions)
    torch.testing.assert_close(ours.cos[:, 0], cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.signed_sin[:, 0, 32:], sin[0, :, 32:], atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.signed_sin[:, 0, :32], -sin[0, :, :32], atol=1e-6, rtol=0)


def test_the_built_in_model(model_folder: Path) -> None:
    ids = [1, 9690, 198, 1780, 314, 216, 34, 27, 34, 47, 2]
    config = ModelConfig.from_folder(model_folder)
    model = load_model(model_folder, config, 64, torch.device("cpu"), torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(model, ids), expected_logits(oracle, ids), atol=1e-3, rtol=1e-5)


def test_configurations_and_classes_name_the_same_architectures() -> None:
    assert set(ARCHITECTURES) == set(SUPPORTED_ARCHITECTURES)


def test_parameters_take_no_memory_until_loaded(tmp_path: Path) -> None:
    make_folder(tmp_path, "Qwen3Moe", tie_word_embeddings=True)
    config = ModelConfig.from_folder(tmp_path)
    model = create_model(config, NoCommunicator(), 64, torch.bfloat16, torch.device("cpu"))
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert model.model.rotary_emb.table.device.type == "cpu"
    assert model.lm_head.weight is model.model.embed_tokens.weight
