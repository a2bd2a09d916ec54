"""What a model is, read from its folder's config.json. Knows no tensor, and does not load torch.

A key that is neither honoured nor known to be harmless is refused by its name: a checkpoint that asks for
something this library does not do would otherwise give fluent, wrong answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.models.config_keys import Keys, UnsupportedModel
from minisgl.models.rope_config import RopeConfig

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh")

# For each architecture, what transformers takes where a key is absent. A key read below that is not here must be there.
_COMMON_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"attention_bias": False, "head_dim": 128},
    "Qwen3MoeForCausalLM": {"attention_bias": False, "norm_topk_prob": False},
}
SUPPORTED_ARCHITECTURES = tuple(_DEFAULTS)

# Keys that say nothing of what a forward pass computes. max_window_layers has no effect without use_sliding_window;
# the second half are sampling defaults of old checkpoints, which generation_config.json has long taken over.
_HARMLESS = frozenset(
    """architectures model_type transformers_version transformers.js_config _name_or_path _attn_implementation
    use_cache initializer_range attention_dropout pretraining_tp pad_token_id bos_token_id sep_token_id
    decoder_start_token_id output_router_logits router_aux_loss_coef max_window_layers return_dict output_attentions
    output_hidden_states torchscript problem_type id2label label2id task_specific_params tokenizer_class prefix
    finetuning_task chunk_size_feed_forward use_bfloat16 tf_legacy_loss is_llama_config unsloth_fixed unsloth_version

    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""".split()
)

# Keys that change nothing at this value.
_NEUTRAL: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_sliding_window": False,
    "use_mrope": False,
    "decoder_sparse_step": 1,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes are of the whole model, not of one rank's share. num_experts 0 means a dense MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    hidden_act: str  # one of ACTIVATIONS
    attention_bias: bool  # as the key says: Qwen2 has biases without asking
    mlp_bias: bool
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0
    top_k: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read folder/config.json. Raises UnsupportedModel, or ValueError for what is no configuration at all."""
        path = Path(folder) / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{folder} is no model folder: config.json cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path} must hold a JSON object, not {type(data).__name__}")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """From the contents of config.json, with transformers 4's key names or 5's."""
        architecture = _architecture(data.get("architectures"))
        defaults = {**_COMMON_DEFAULTS, **_DEFAULTS[architecture]}
        keys = Keys(data, "config.json", defaults, _HARMLESS, _NEUTRAL)
        num_heads, hidden_size = keys.integer("num_attention_heads"), keys.integer("hidden_size")
        max_position = keys.integer("max_position_embeddings")
        rope = RopeConfig.from_keys(keys, max_position)
        _refuse_sliding_window(keys, architecture, "sliding_window" in data)
        config = cls(
            architecture=architecture,
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=keys.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=keys.integer("num_key_value_heads", default=num_heads),
            head_dim=keys.integer("head_dim", default=defaults.get("head_dim", hidden_size // num_heads)),
            rms_norm_eps=keys.number("rms_norm_eps"),
            max_position=rope.reach(max_position),
            rope=rope,
            tie_word_embeddings=keys.boolean("tie_word_embeddings"),
            hidden_act=keys.choice("hidden_act", ACTIVATIONS),
            attention_bias="attention_bias" in defaults and keys.boolean("attention_bias"),
            mlp_bias="mlp_bias" in defaults and keys.boolean("mlp_bias"),
            dtype=_dtype(keys),
            eos_token_ids=_eos_token_ids(keys.take("eos_token_id", default=[])),
            **(_moe_fields(keys) if "norm_topk_prob" in defaults else {}),
        )
        keys.refuse_the_rest()
        _check_shapes(config)
        return config


def _architecture(names: Any) -> str:
    if isinstance(names, list) and len(names) == 1 and names[0] in _DEFAULTS:
        return str(names[0])
    raise UnsupportedModel(f"architectures {names!r:.200} is not supported, only {', '.join(_DEFAULTS)}")


def _moe_fields(keys: Keys) -> dict[str, Any]:
    return {
        "num_experts": keys.integer("num_experts", default=keys.take("num_local_experts", default=None)),
        "top_k": keys.integer("num_experts_per_tok"),
        "moe_intermediate_size": keys.integer("moe_intermediate_size"),
        "norm_topk_prob": keys.boolean("norm_topk_prob"),
    }


def _refuse_sliding_window(keys: Keys, architecture: str, is_given: bool) -> None:
    """Qwen's sliding_window means nothing without use_sliding_window, which is refused unless false."""
    if architecture == "MistralForCausalLM" and not is_given:
        raise UnsupportedModel(
            "sliding_window is missing in config.json, which for Mistral means 4096, and that is not supported: write "
            "null if the model has none"
        )
    window = keys.take("sliding_window", default=None)
    if window is not None and not architecture.startswith("Qwen"):
        raise UnsupportedModel(f"sliding_window {window!r:.80} is not supported, only null")
    layer_types = keys.take("layer_types", default=[])
    if any(kind != "full_attention" for kind in layer_types):
        raise UnsupportedModel(f"layer_types {layer_types!r:.200} is not supported, only full_attention")


def _dtype(keys: Keys) -> str:
    old_name = keys.take("torch_dtype", default="float32")
    name = keys.take("dtype", default=old_name)
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(f"dtype {name!r:.80} is not supported, only float32, bfloat16 and float16")
    return str(name)


def _eos_token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise UnsupportedModel(f"eos_token_id must be a token id or a list of them, not {value!r:.80}")
    return tuple(ids)


def _check_shapes(config: ModelConfig) -> None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
    if config.head_dim % 2:
        raise UnsupportedModel(f"head_dim {config.head_dim} must be even: rotary embeddings turn pairs")
    if config.top_k > config.num_experts:
        raise UnsupportedModel(f"num_experts_per_tok {config.top_k} is more than num_experts {config.num_experts}")
