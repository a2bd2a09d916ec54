"""A model with experts on a GPU: in graphs and outside the kernels give what the loop in plain torch gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_on_gpu import OPTIONS, distance, make_engine, prefill_and_decode_logits, scheduled, scheduler, tokens
from tiny_model import VOCAB, make_tiny_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from minisgl.moe.layer import waits_for_host
from minisgl.stage7.llm import LLM

pytestmark = pytest.mark.gpu

SHAPE = {  # heads that FlashInfer's kernels are made for
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 72,
    "max_position_embeddings": 512,
    "norm_topk_prob": True,
}


def make_folder(folder: Path, experts: int, top_k: int, spread: float) -> Path:
    make_tiny_model(folder)  # for its tokenizer
    torch.manual_seed(0)
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    sizes = {**SHAPE, "num_experts": experts, "num_experts_per_tok": top_k}
    config = Qwen3MoeConfig(vocab_size=VOCAB, initializer_range=spread, tie_word_embeddings=False, **ids, **sizes)
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chooses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each token goes to two of eight experts."""
    return make_folder(tmp_path_factory.mktemp("chooses"), 8, 2, 0.3)


@pytest.fixture(scope="module")
def takes_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each goes to all four: a rounding in bfloat16 cannot send one elsewhere."""
    return make_folder(tmp_path_factory.mktemp("takes_all"), 4, 4, 0.06)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits(chooses: Path, takes_all: Path, dtype: str) -> None:
    folder = chooses if dtype == "float32" else takes_all
    found = prefill_and_decode_logits(folder, dtype=dtype)
    plain = prefill_and_decode_logits(folder, dtype="float32", attn="torch", disable_fusion=True)
    limit = 1e-4 if dtype == "float32" else 4e-2
    for name, logits, expected in zip(("prefill", "graph", "eager"), found, plain, strict=True):
        assert distance(logits, expected) < limit, f"{name}: {distance(logits, expected)}"
    assert distance(found[1], found[2]) < (1e-5 if dtype == "float32" else 2e-2), "graph against eager"


def test_graphs_are_recorded_unless_the_loop_runs(chooses: Path) -> None:
    for options in ({}, {"disable_fusion": True, "moe_backend": "triton"}):
        fused = make_engine(chooses, **options)
        assert not waits_for_host(fused.model)
        assert fused.graphs is not None
    for options in ({"disable_fusion": True}, {"moe_backend": "torch"}):
        plain = make_engine(chooses, **options)
        assert waits_for_host(plain.model)
        assert plain.graphs is None


def test_tokens_are_those_of_the_cpu(chooses: Path) -> None:
    variants: list[dict[str, Any]] = [
        {"device": "cpu"},
        {},
        {"cuda_graph_max_bs": 0},
        {"disable_fusion": True},
        {"moe_backend": "torch"},
    ]
    found = []
    for variant in variants:
        with LLM(str(chooses), **{**OPTIONS, "dtype": "float32", **variant}) as llm:
            found.append(tokens(llm))
    assert all(each == found[0] for each in found)


def test_no_step_waits_for_the_device(chooses: Path) -> None:
    for largest in (8, 0):
        made = scheduler(make_engine(chooses, dtype="bfloat16", cuda_graph_max_bs=largest))
        try:
            for step in range(12):
                if step == 3:  # kernels are compiled and loaded
                    torch.cuda.set_sync_debug_mode("error")
                forward_input = scheduled(made)
                made.commit(forward_input, made.forward(forward_input))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_answer_as_one(chooses: Path) -> None:
    found = []
    for tp in (1, 2):
        with LLM(str(chooses), **{**OPTIONS, "dtype": "float32", "tp": tp}) as llm:
            found.append(tokens(llm))
    assert found[0] == found[1]
