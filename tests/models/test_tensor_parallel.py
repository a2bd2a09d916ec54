"""Ranks together compute what one would, whatever divides and whatever does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import ThreadCommunicator, on_ranks
from tiny_models import expected_logits, logits, make_folder

from minisgl.models.config import ModelConfig
from minisgl.models.load import load_model

IDS = [5, 100, 0, 17, 17, 3, 64, 99, 41]
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("Llama", {}, 2),
    ("Llama", {}, 3),
    ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, 2),
    ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2}, 4),  # each KV head twice, groups of 2 + 1
    ("Qwen2", {}, 2),
    ("Qwen3", {"attention_bias": True}, 3),
    ("Qwen3Moe", {}, 2),
    ("Qwen3Moe", {}, 3),
]


@pytest.mark.parametrize(("family", "changes", "size"), CASES)
def test_ranks_compute_the_whole(tmp_path: Path, family: str, changes: dict[str, Any], size: int) -> None:
    expected = expected_logits(make_folder(tmp_path, family, **changes), IDS)
    config = ModelConfig.from_folder(tmp_path)

    def work(comm: ThreadCommunicator) -> tuple[torch.Tensor, int]:
        model = load_model(tmp_path, config, 64, torch.device("cpu"), torch.float32, communicator=comm)
        return model.lm_head.gather(logits(model, IDS)), comm.num_all_reduces

    for ours, num_all_reduces in on_ranks(size, work):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
        assert num_all_reduces == 2 * config.num_layers + 1


def test_dummy_weights_keep_ranks_in_step(tmp_path: Path) -> None:
    """A router that differed between ranks would send a token's halves to different experts."""
    make_folder(tmp_path, "Qwen3Moe")
    config = ModelConfig.from_folder(tmp_path)

    def work(comm: ThreadCommunicator) -> list[torch.Tensor]:
        model = load_model(tmp_path, config, 64, torch.device("cpu"), torch.float32, True, comm)
        named = dict(model.named_parameters())
        routers = [value for name, value in named.items() if name.endswith("mlp.gate.weight")]
        return [value.to_dense() if value.is_mkldnn else value for value in routers]

    first, second = on_ranks(2, work)
    assert len(first) == config.num_layers
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
