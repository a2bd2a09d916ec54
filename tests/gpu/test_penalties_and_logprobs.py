"""Penalties and logprobs on a GPU: those of the CPU, in graphs and outside, and nothing is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model

from minisgl.core.config import make_config
from minisgl.core.outputs import Completion
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.models.config import ModelConfig
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.graph_runner import GraphEngine
from minisgl.stage7.llm import LLM

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"num_pages": 200, "max_seq_len": 512, "max_running_requests": 16}
PROMPTS = [[(7 * i + 11 * length) % 250 for i in range(length)] for length in (5, 70, 300, 1, 16)]
FEW = {65: 25.0, 66: 25.0, 67: 20.0, 68: -100.0}  # tokens that then often follow themselves
PARAMS = [
    SamplingParams(max_tokens=30, frequency_penalty=1.5, presence_penalty=1.0, logit_bias=FEW, logprobs=3),
    SamplingParams(max_tokens=30, repetition_penalty=1.3, logprobs=20, prompt_logprobs=True),
    SamplingParams(max_tokens=9, min_tokens=9, logit_bias={257: 60.0}, logprobs=0, prompt_logprobs=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=25, ignore_eos=True, repetition_penalty=1.2, logit_bias=FEW),
    SamplingParams(max_tokens=20, ignore_eos=True),
]
FILTERED = [
    *PARAMS[1:3],
    SamplingParams(temperature=0.7, seed=4, top_p=0.9, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=5, top_k=20, min_p=0.01, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=6, max_tokens=20, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With narrow weights. On a CPU float32 is within 1.3e-5 of float64 with them, and within 5e-3 with wide ones."""
    heads = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    made = make_tiny_model(tmp_path_factory.mktemp("tiny"), **heads)
    tensors = load_file(made / "model.safetensors")
    narrow = {name: x * 0.2 if x.dim() == 2 and "embed" not in name else x for name, x in tensors.items()}
    save_file(narrow, made / "model.safetensors", {"format": "pt"})
    return made


def generate(folder: Path, **options: Any) -> list[Completion]:
    with LLM(str(folder), dtype="float32", **{**OPTIONS, **options}) as llm:
        return llm.generate(PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Completion]:
    return generate(folder, device="cpu")


@pytest.mark.parametrize(
    "options",
    [{}, {"disable_overlap": True}, {"cuda_graph_max_bs": 0}, {"disable_fusion": True}, {"max_prefill_length": 64}],
)
def test_float32_is_that_of_the_cpu(folder: Path, expected: list[Completion], options: dict[str, Any]) -> None:
    for found, wanted in zip(generate(folder, device="cuda", **options), expected, strict=True):
        assert found.token_ids == wanted.token_ids
        assert (found.logprobs is None) == (wanted.logprobs is None)
        for a, b in zip(found.logprobs or [], wanted.logprobs or [], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-4)
        assert (found.prompt_logprobs is None) == (wanted.prompt_logprobs is None)
        for c, d in zip((found.prompt_logprobs or [])[1:], (wanted.prompt_logprobs or [])[1:], strict=True):
            assert c is not None
            assert d is not None
            assert c.logprob == pytest.approx(d.logprob, abs=1e-4)


@pytest.fixture
def no_syncs() -> Iterator[None]:
    """torch raises at whatever makes the host wait for the device (but for events, which say so themselves)."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("largest", "params"), [(8, PARAMS), (0, PARAMS), (8, FILTERED)], ids=["graphs", "no graphs", "filters"]
)
def test_no_step_waits_for_the_device(folder: Path, largest: int, params: list[SamplingParams], no_syncs: None) -> None:
    options = {**OPTIONS, "device": "cuda", "dtype": "bfloat16", "cuda_graph_max_bs": largest}
    config = make_config(OverlapConfig, options)
    engine = GraphEngine(config, folder, ModelConfig.from_folder(folder), 512)
    scheduler = Scheduler(config, engine, frozenset({257}), Tracer(None))
    for step in range(12):
        if step in (0, 4):
            for uid, (prompt, asked) in enumerate(zip(PROMPTS, params, strict=True)):
                scheduler.add(10 * step + uid, prompt, asked)
        if step == 4:  # kernels are compiled and loaded
            torch.cuda.set_sync_debug_mode("error")
        forward_input = scheduler.schedule()
        assert forward_input is not None
        scheduler.commit(forward_input, scheduler.forward(forward_input))
