"""Weights: all of them, each rank its slices only, once in memory; faults named before anything is read."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import logits, make_folder, rewrite_config

from minisgl.core.protocols import NoCommunicator
from minisgl.models import weights
from minisgl.models.config import ModelConfig
from minisgl.models.registry import create_model
from minisgl.models.weights import dummy_weights, load_weights

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32, comm: Any = None, **options: Any) -> torch.nn.Module:
    config = ModelConfig.from_folder(folder)
    comm = comm or NoCommunicator()
    model = create_model(config, comm, 64, dtype, CPU)
    load_weights(model, folder, config, dtype, CPU, comm, **options)
    return model


class CountingReader:
    """safetensors' reader, counting the values that were read."""

    values = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._file = safe_open(*args, **kwargs)

    def __enter__(self) -> CountingReader:
        self._file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.__exit__(*args)

    def keys(self) -> list[str]:
        return self._file.keys()

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self._file.get_slice(name))


class CountingSlice:
    def __init__(self, source: Any) -> None:
        self._source = source

    def get_shape(self) -> list[int]:
        return self._source.get_shape()

    def __getitem__(self, index: Any) -> torch.Tensor:
        read = self._source[index]
        CountingReader.values += read.numel()
        return read


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CountingReader]]:
    monkeypatch.setattr(weights, "safe_open", CountingReader)
    monkeypatch.setattr(CountingReader, "values", 0)
    return CountingReader


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3Moe"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_rank_reads_what_it_holds_and_no_more(
    tmp_path: Path, counting: type[CountingReader], family: str, size: int
) -> None:
    make_folder(tmp_path, family)
    tensors = load_file(tmp_path / "model.safetensors")
    everything = sum(tensor.numel() for tensor in tensors.values())
    replicated = sum(tensor.numel() for name, tensor in tensors.items() if "norm" in name or "mlp.gate." in name)
    read = []
    for rank in range(size):
        counting.values = 0
        model = load(tmp_path, comm=SimpleNamespace(rank=rank, size=size))
        assert counting.values == sum(parameter.numel() for parameter in model.parameters())
        read.append(counting.values)
    assert sum(read) == everything + (size - 1) * replicated


def test_progress_ends_at_the_bytes_of_the_rank(tmp_path: Path) -> None:
    make_folder(tmp_path, "Qwen3Moe")
    calls: list[tuple[int, int]] = []
    model = load(tmp_path, torch.bfloat16, progress=lambda done, total: calls.append((done, total)))
    total = sum(parameter.numel() * 2 for parameter in model.parameters())
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (total, total)


def test_many_files_with_an_index(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path / "one", "Llama")
    oracle.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    assert torch.equal(logits(one, [1, 2, 3]), logits(many, [1, 2, 3]))


def change(folder: Path, remove: tuple[str, ...] = (), **add: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if name not in remove} | add
    save_file(left, folder / "model.safetensors")


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    make_folder(tmp_path, "Llama")
    missing, wrong = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"
    change(tmp_path, (missing,), **{"model.layers.0.extra": torch.ones(2), wrong: torch.ones(69, 48)})
    with pytest.raises(ValueError, match="not those of its config.json's LlamaForCausalLM") as error:
        load(tmp_path)
    for part in (f"missing: {missing}", "unexpected: model.layers.0.extra", f"{wrong} is [69, 48], not [70, 48]"):
        assert part in str(error.value)


def test_biases_the_config_does_not_ask_for_are_unexpected(tmp_path: Path) -> None:
    make_folder(tmp_path, "Llama", attention_bias=True)
    rewrite_config(tmp_path, attention_bias=False)
    with pytest.raises(ValueError, match=r"unexpected: model.layers.0.self_attn.k_proj.bias.* and 3 more"):
        load(tmp_path)


def test_redundant_tensors_are_passed_over(tmp_path: Path) -> None:
    make_folder(tmp_path, "Llama", tie_word_embeddings=True)
    before = logits(load(tmp_path), [1, 2, 3])
    change(tmp_path, **{"lm_head.weight": torch.zeros(101, 48), "model.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(logits(load(tmp_path), [1, 2, 3]), before)


def test_no_safetensors(tmp_path: Path) -> None:
    make_folder(tmp_path, "Llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="lacks model.safetensors: only safetensors files are read"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="is no index"):
        load(tmp_path)


def test_a_tied_head_is_one_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where weights stay as they are loaded; oneDNN's order would be a second tensor."""
    monkeypatch.setattr("minisgl.layers.linear.pack_linear", lambda weight: weight)
    make_folder(tmp_path, "Llama", tie_word_embeddings=True)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.is_meta
    assert "lm_head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("dummy", [False, True])
def test_packing_does_not_hold_the_model_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dummy: bool) -> None:
    """When a weight gets its packed copy, those packed before it are gone."""
    plain: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def pack(weight: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in plain))
        plain.append(weakref.ref(weight))
        return weight.clone()

    monkeypatch.setattr("minisgl.layers.linear.pack_linear", pack)
    make_folder(tmp_path, "Llama")
    config = ModelConfig.from_folder(tmp_path)
    model = create_model(config, NoCommunicator(), 64, torch.float32, CPU)
    if dummy:
        dummy_weights(model, torch.float32, CPU)
    else:
        load_weights(model, tmp_path, config, torch.float32, CPU, NoCommunicator())
    assert len(plain) == 4 * config.num_layers + 1
    assert most <= 1, "the model was in memory twice"


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_dummy_weights_are_finite_and_repeat(tmp_path: Path, family: str) -> None:
    make_folder(tmp_path, family, num_hidden_layers=12)
    config = ModelConfig.from_folder(tmp_path)
    answers = []
    for seed in (0, 0, 1):
        model = create_model(config, NoCommunicator(), 64, torch.float32, CPU)
        dummy_weights(model, torch.float32, CPU, seed)
        answers.append(logits(model, [3, 1, 4, 1, 5]))
    assert answers[0].isfinite().all()
    assert 0.1 < answers[0].std() < 10
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])
