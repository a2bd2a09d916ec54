"""Turns one Llama GGUF file into a Hugging Face folder. Knows nothing of caches, downloads or torch.

The weights are dequantised to float32 and rounded to bfloat16 (to nearest, ties to even), which is what transformers'
own GGUF loader ends up with, bit for bit, in a quarter of its time.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, Keys, TokenType
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, folder: Path) -> None:
    """Writes config, tokenizer and bfloat16 weights of `gguf` into the existing `folder`.

    Raises ValueError, naming what was found, for an architecture other than llama or a tokenizer other than smollm's.
    """
    reader = GGUFReader(gguf)
    found = _field(reader, Keys.General.ARCHITECTURE), _field(reader, Keys.Tokenizer.PRE)
    if found != ("llama", "smollm"):
        raise ValueError(f"{gguf}: architecture and tokenizer are {found}, but only ('llama', 'smollm') is converted")
    config = _config(reader)
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    _tokenizer(reader).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(reader))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    write_bf16(folder / "model.safetensors", [_weight(tensor, heads) for tensor in reader.tensors])


def write_bf16(path: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes bfloat16 bit patterns (uint16 arrays) as one safetensors file: header length, JSON header, bytes.

    By hand, since numpy has no bfloat16 and the raw-bytes call of the safetensors package changed between releases.
    """
    arrays = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays:
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers map the file: the data should begin on an aligned byte
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in arrays:
            file.write(np.ascontiguousarray(array).data)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Bit patterns of finite float32 values as bfloat16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _weight(tensor: Any, heads: dict[str, int]) -> tuple[str, np.ndarray]:
    stem, kind = tensor.name.rsplit(".", 1)
    weight = dequantize(tensor.data, tensor.tensor_type)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}", to_bf16(weight)
    _, layer, part = stem.split(".")
    if part in heads:  # GGUF pairs neighbouring rows for RoPE, Hugging Face pairs row i with i + head_dim / 2
        rows, columns = weight.shape
        n = heads[part]
        weight = weight.reshape(n, rows // n // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return f"model.layers.{layer}.{_IN_BLOCK[part]}.{kind}", to_bf16(weight)


def _config(reader: GGUFReader) -> dict[str, Any]:
    def llama(key: str) -> Any:
        return _field(reader, key.format(arch="llama"))

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_field(reader, Keys.Tokenizer.LIST)),
        "hidden_size": llama(Keys.LLM.EMBEDDING_LENGTH),
        "intermediate_size": llama(Keys.LLM.FEED_FORWARD_LENGTH),
        "num_hidden_layers": llama(Keys.LLM.BLOCK_COUNT),
        "num_attention_heads": llama(Keys.Attention.HEAD_COUNT),
        "num_key_value_heads": llama(Keys.Attention.HEAD_COUNT_KV),
        "head_dim": llama(Keys.Rope.DIMENSION_COUNT),
        "max_position_embeddings": llama(Keys.LLM.CONTEXT_LENGTH),
        "rms_norm_eps": float(f"{llama(Keys.Attention.LAYERNORM_RMS_EPS):.6g}"),  # stored as float32: 9.99999e-06
        "rope_theta": llama(Keys.Rope.FREQ_BASE),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": _field(reader, Keys.Tokenizer.BOS_ID),
        "eos_token_id": _field(reader, Keys.Tokenizer.EOS_ID),
        "pad_token_id": _field(reader, Keys.Tokenizer.PAD_ID),
        "torch_dtype": "bfloat16",
    }


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    tokens = _field(reader, Keys.Tokenizer.LIST)
    merges = [tuple(merge.split(" ")) for merge in _field(reader, Keys.Tokenizer.MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # llama.cpp's name for this pair is "smollm"; transformers' GGUF loader drops the digits half of it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, Keys.Tokenizer.TOKEN_TYPE)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    tokens = _field(reader, Keys.Tokenizer.LIST)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _field(reader, Keys.LLM.CONTEXT_LENGTH.format(arch="llama")),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 adds token types, Llama rejects them
        "bos_token": tokens[_field(reader, Keys.Tokenizer.BOS_ID)],
        "eos_token": tokens[_field(reader, Keys.Tokenizer.EOS_ID)],
        "pad_token": tokens[_field(reader, Keys.Tokenizer.PAD_ID)],
        "unk_token": tokens[_field(reader, Keys.Tokenizer.UNK_ID)],
        "chat_template": _field(reader, Keys.Tokenizer.CHAT_TEMPLATE),
    }


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no field {key!r}")
    return field.contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
