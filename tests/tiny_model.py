"""A random Llama of a few kilobytes with a tokenizer of bytes, for tests of everything around a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 259  # 256 bytes and 3 special tokens: odd, so that it does not divide by 2
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 50,
    "max_position_embeddings": 512,
}


def make_tiny_model(folder: Path, **shape: Any) -> Path:
    """A Hugging Face folder. Wide weights: random models of the usual scale answer with near ties."""
    torch.manual_seed(0)
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    config = LlamaConfig(vocab_size=VOCAB, initializer_range=0.3, **ids, **{**SHAPE, **shape})
    LlamaForCausalLM(config).float().save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=rust, **names).save_pretrained(folder)
    return folder
