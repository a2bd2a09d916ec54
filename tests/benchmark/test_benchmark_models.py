"""Folders without weights: the right shapes, a tokenizer for any text, and activations that stay finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import SMALL, small

from minisgl.benchmark.floor import step_bytes
from minisgl.benchmark.models import CONFIGS, weightless_folder, write_folder
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.tokenizer import Tokenizer
from minisgl.models.config import ModelConfig
from minisgl.stage7.graph_runner import GraphEngine
from minisgl.stage7.llm import LLM


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-0.6b", 0.596), ("llama-3.1-8b", 8.03), ("qwen3-32b", 32.8), ("qwen3-30b-a3b", 30.5)]
)
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    config = ModelConfig.from_dict(CONFIGS[name])
    every_expert_is_hit = 10**6
    read = step_bytes(config, torch.bfloat16, every_expert_is_hit, 0) / 2
    assert read / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "batch", "ms"),
    [
        ("qwen3-0.6b", 1, 0.305),
        ("qwen3-0.6b", 64, 2.03),
        ("qwen3-0.6b", 256, 7.27),
        ("llama-3.1-8b", 1, 3.52),
        ("llama-3.1-8b", 64, 5.49),
        ("llama-3.1-8b", 256, 11.48),
    ],
)
def test_floor_is_weights_and_kv_over_bandwidth(name: str, batch: int, ms: float) -> None:
    """As computed by hand for 4.3 TB/s. An untied embedding table is not read whole."""
    read = step_bytes(ModelConfig.from_dict(CONFIGS[name]), torch.bfloat16, batch, 1024)
    assert read / 4.3e12 * 1e3 == pytest.approx(ms, rel=0.01)


def test_few_tokens_read_few_experts() -> None:
    config = ModelConfig.from_dict(CONFIGS["qwen3-30b-a3b"])
    active = step_bytes(config, torch.bfloat16, 1, 0) / 2
    assert active / 1e9 == pytest.approx(3.3 - 0.31, rel=0.03)  # what its name says, less the embedding table


def test_tokenizer_has_a_text_for_every_id(tmp_path: Path) -> None:
    folder = weightless_folder("qwen3-0.6b", tmp_path)
    tokenizer = Tokenizer.from_folder(folder)
    eos = CONFIGS["qwen3-0.6b"]["eos_token_id"]
    assert tokenizer.vocab_size == CONFIGS["qwen3-0.6b"]["vocab_size"]
    assert tokenizer.eos_ids == {eos}
    text = "Any text at all: ein Wort, 一个字."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("hello")) == 5
    assert all(tokenizer.decode([token_id]) for token_id in (65, 256, 10000, eos - 2, tokenizer.vocab_size - 1))
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert chat.count(eos) == 1
    assert chat[0] == eos - 1
    assert weightless_folder("qwen3-0.6b", tmp_path) == folder


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dummy_weights_give_finite_logits_through_all_layers(
    tmp_path: Path, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many layers as the real model has: what grows from layer to layer would show."""
    config = {**small(CONFIGS[name]), "num_hidden_layers": CONFIGS[name]["num_hidden_layers"]}
    write_folder(tmp_path, config)
    seen = []
    run_model = GraphEngine.run_model

    def recorded(engine: GraphEngine, batch: object) -> torch.Tensor:
        seen.append(run_model(engine, batch).float())  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(GraphEngine, "run_model", recorded)
    with LLM(model=str(tmp_path), dummy_weight=True, dtype=dtype, threads=1, num_pages=16) as llm:
        llm.generate([[1, 2, 3], [4] * 40], SamplingParams(temperature=0.6, max_tokens=3, ignore_eos=True))
    assert len(seen) == 3
    logits = torch.cat(seen)
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3, "random logits should look like noise, neither flat nor all on one token"
    assert SMALL["vocab_size"] == logits.shape[1]
