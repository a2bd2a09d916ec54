"""Models to be measured without their weights: folders with a config and a tokenizer, made here. Knows no engine.

How fast a model is depends on its shapes, not on what its weights say: `--dummy-weight` fills these. The shapes are
those of the published configurations; the tokenizer is ours, one token a byte.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from minisgl.models.builtin import cache_root

FORMAT = 1  # raise it when the contents change: old folders are then left alone and new ones are made

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128009,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "llama-3.1-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def weightless_folder(name: str, cache: Path | None = None) -> Path:
    """The folder of one of CONFIGS, made first if it is missing. Any number of processes may ask at once."""
    folder = (cache or cache_root() / "weightless") / f"{name}-v{FORMAT}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=name, dir=folder.parent))
        try:
            write_folder(made, CONFIGS[name])
            made.chmod(0o755)
            os.rename(made, folder)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not folder.is_dir():  # else another process was first
                raise
    return folder


def write_folder(folder: Path, config: dict[str, Any]) -> None:
    """A Hugging Face model folder without weights, for a config with an eos_token_id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = _vocabulary(config["vocab_size"], config["eos_token_id"])
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _vocabulary(size: int, eos_id: int) -> dict[str, int]:
    """256 bytes, then words that no text is encoded to: every id that is drawn decodes to some text of its own, so
    that a server sends a chunk for it."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}
    vocab |= {f"Ġw{i}": i for i in range(256, size)}
    for token_id, special in ((eos_id - 1, "<|im_start|>"), (eos_id, "<|im_end|>")):
        del vocab[f"Ġw{token_id}"]
        vocab[special] = token_id
    return vocab
