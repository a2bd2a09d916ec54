"""A configuration is honoured key by key, under old and new names; what is not is refused by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from minisgl.models.config import ModelConfig, UnsupportedModel
from minisgl.models.rope_config import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"]}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def read(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(base | changes)


def test_defaults_are_those_of_transformers() -> None:
    config = read(LLAMA)
    assert (config.head_dim, config.rms_norm_eps, config.hidden_act) == (8, 1e-6, "silu")
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert (config.dtype, config.eos_token_ids, config.num_experts) == ("float32", (), 0)
    assert config.rope == RopeConfig()
    assert read(QWEN3).head_dim == 128
    assert read(MOE).norm_topk_prob is False
    assert read(LLAMA, num_key_value_heads=None).num_kv_heads == 6


def test_what_is_asked_for_is_read() -> None:
    config = read(
        LLAMA,
        head_dim=10,
        rms_norm_eps=1e-5,
        hidden_act="gelu",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        torch_dtype="float16",
        eos_token_id=[3, 5],
    )
    assert (config.head_dim, config.rms_norm_eps, config.hidden_act) == (10, 1e-5, "gelu")
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (True, True, True)
    assert (config.dtype, config.eos_token_ids) == ("float16", (3, 5))
    assert (read(MOE).num_experts, read(MOE).top_k, read(MOE).moe_intermediate_size) == (8, 2, 20)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        ),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"rope_scaling": None, "rope_theta": 10000.0}, {}),
    ],
)
def test_old_and_new_key_names_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read(LLAMA, **old) == read(LLAMA, **new)


def test_yarn_reaches_as_far_as_it_says() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = read(LLAMA, rope_scaling=yarn)
    assert config.max_position == 16384
    assert config.rope.attention_factor == pytest.approx(1.1386294)
    assert read(LLAMA, rope_scaling=yarn | {"attention_factor": 1.5}).rope.attention_factor == 1.5


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (LLAMA, {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        (LLAMA, {"architectures": None}, "architectures None"),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA, {"logit_softcapping": 30.0}, "logit_softcapping=30.0"),
        (LLAMA, {"embedding_multiplier": 12, "residual_multiplier": 0.2}, "embedding_multiplier=12, residual"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved"),
        (LLAMA, {"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
        (LLAMA, {"use_something": False}, "use_something"),
        (LLAMA, {"sliding_window": 1024}, "sliding_window 1024"),
        (MISTRAL, {"sliding_window": 4096}, "sliding_window 4096"),
        (MISTRAL, {"attention_bias": True}, "attention_bias"),
        (QWEN2, {"mlp_bias": True}, "mlp_bias"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN3, {"num_experts": 8}, "num_experts"),
        (MOE, {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (MOE, {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "'longrope'"),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "factor is missing in rope_scaling"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling must be an object"),
        (LLAMA, {"rope_theta": -1}, "rope_theta"),
        (LLAMA, {"hidden_act": "relu2"}, "hidden_act 'relu2'"),
        (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (LLAMA, {"num_key_value_heads": 4}, "multiple of num_key_value_heads 4"),
        (LLAMA, {"head_dim": 7}, "head_dim 7"),
        (LLAMA, {"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
        (LLAMA, {"vocab_size": True}, "vocab_size"),
        (LLAMA, {"eos_token_id": "</s>"}, "eos_token_id"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) and len(value) < 3 else "",
)
def test_what_is_not_done_is_refused_by_name(base: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    assert read(base) is not None, "the base must be fine: only the change is to blame"
    with pytest.raises(UnsupportedModel, match=named):
        read(base, **changes)


def test_a_window_that_transformers_would_take_by_default_is_not_left_out() -> None:
    """Mistral's is 4096 where the key is absent, and none only where it is null: full attention would be wrong."""
    assert MistralConfig().sliding_window == 4096
    absent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    with pytest.raises(UnsupportedModel, match="sliding_window is missing .* 4096.* write null"):
        ModelConfig.from_dict(absent)
    assert ModelConfig.from_dict(absent | {"architectures": ["LlamaForCausalLM"]}) == read(LLAMA)


@pytest.mark.parametrize("name", sorted(LLAMA.keys() - {"model_type", "architectures", "num_key_value_heads"}))
def test_a_missing_size_is_named(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name} is missing"):
        ModelConfig.from_dict({key: value for key, value in LLAMA.items() if key != name})


@pytest.mark.parametrize(
    "harmless",
    [
        {"attention_dropout": 0.1, "initializer_range": 0.02, "use_cache": False, "transformers_version": "4.40"},
        {"rope_scaling": None, "quantization_config": None, "unheard_of": None, "also_unheard_of": []},
        {"temperature": 0.6, "top_p": 0.9, "max_length": 20, "do_sample": True, "use_bfloat16": False},
        {"pretraining_tp": 1, "attention_bias": False, "mlp_bias": False, "rope_interleaved": False},
    ],
)
def test_what_changes_nothing_is_taken(harmless: dict[str, Any]) -> None:
    for base in (LLAMA, MISTRAL, QWEN2, QWEN3, MOE):
        assert read(base, **harmless) == read(base)


@pytest.mark.parametrize(
    ("text", "named"), [(None, "config.json cannot be read"), ("{", "is not JSON"), ("[]", "object, not list")]
)
def test_what_is_no_configuration(tmp_path: Path, text: str | None, named: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_folder(tmp_path)


def test_from_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert ModelConfig.from_folder(tmp_path) == read(QWEN2)


def test_reading_a_configuration_loads_no_torch() -> None:
    """The API process does it, and answers before torch could have been imported."""
    code = "import sys, minisgl.models.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
