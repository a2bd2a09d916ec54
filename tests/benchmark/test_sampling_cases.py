"""What `kernels` times of sampling: each way to draw, ours with its filters and FlashInfer's beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import small

from minisgl.benchmark.kernel_cases import Shape
from minisgl.benchmark.models import CONFIGS
from minisgl.benchmark.sampling_cases import CASES
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.models.config import ModelConfig
from minisgl.sampling.sampler import Sampler

ROWS = 3
SHAPE = Shape(ModelConfig.from_dict(small(CONFIGS["qwen3-0.6b"])), torch.float32, torch.device("cpu"), ROWS, 40, 16)
ASKED = {"sample_drawn": {}, "sample_top_k": {"top_k": 50}, "sample_top_p": {"top_p": 0.9}}
ASKED["sample_top_p_flat"] = ASKED["sample_top_p"]
ASKED["sample_top_k_top_p"] = ASKED["sample_top_k"] | ASKED["sample_top_p"]
NAMES = {
    "sample_drawn": "sampling_from_probs",
    "sample_top_k": "top_k_sampling_from_probs",
    "sample_top_p": "top_p_sampling_from_probs",
    "sample_top_p_flat": "top_p_sampling_from_probs",
    "sample_top_k_top_p": "top_k_top_p_sampling_from_probs",
}


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A stand-in: what was called, and with which settings."""
    calls: list[tuple[str, dict[str, Any]]] = []
    sampling = ModuleType("flashinfer.sampling")

    def draw(name: str) -> Callable[..., torch.Tensor]:
        def call(probs: torch.Tensor, **given: Any) -> torch.Tensor:
            calls.append((name, given))
            torch.testing.assert_close(probs.sum(dim=1), torch.ones(ROWS))
            return probs.argmax(dim=1).int()

        return call

    for name in NAMES.values():
        setattr(sampling, name, draw(name))
    sampling.softmax = lambda logits, t: (logits.float() / t[:, None]).softmax(dim=1)  # type: ignore[attr-defined]
    package = ModuleType("flashinfer")
    package.sampling = sampling  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_flashinfer_draws_each_way_with_settings_a_row(name: str, flashinfer: list[tuple[str, dict[str, Any]]]) -> None:
    forms = CASES[name](SHAPE).forms
    assert {"torch", "minisgl", "flashinfer"} <= forms.keys()
    called, given = flashinfer[-1]
    assert called == NAMES[name]
    shapes = {key: tuple(value.shape) for key, value in given.items()}
    assert shapes == {"seed": (1,), "offset": (1,), **dict.fromkeys(ASKED[name], (ROWS,))}
    for key, value in ASKED[name].items():
        torch.testing.assert_close(given[key].float(), torch.full((ROWS,), float(value)))
    assert forms["flashinfer"]().shape == (ROWS,)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_a_flashinfer_that_does_not_run_is_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert CASES[name](SHAPE).forms.keys() == {"torch", "minisgl"}
    assert "flashinfer cannot run here" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_ours_has_the_filters_that_the_name_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal scores top-k keeps all; of a few high ones a nucleus keeps no other. So each name draws elsewhere."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    steep = torch.zeros(ROWS, SHAPE.config.vocab_size)
    steep[:, :60] = torch.linspace(12, 9, 60)  # the nucleus of 0.9 is the first 20 or so; top-k leaves 50
    monkeypatch.setattr(Shape, "random", lambda self, *sizes: steep.clone())
    sampled = CASES[name](SHAPE).forms["minisgl"]
    masked = []
    from minisgl.sampling.filters import TokenFilters

    apply = TokenFilters.apply

    def seen(self: TokenFilters, scores: torch.Tensor, args: Any) -> torch.Tensor:
        found = apply(self, scores, args)
        masked.append(int(found.isfinite()[0].sum()))
        return found

    monkeypatch.setattr(TokenFilters, "apply", seen)
    sampled()
    kept = masked[-1] if masked else SHAPE.config.vocab_size
    nucleus = "top_p" in ASKED[name]
    assert (kept < 45) == nucleus
    assert (kept <= 50) == bool(ASKED[name])


@pytest.mark.parametrize("name", NAMES)
def test_plain_torch_draws_what_our_filters_leave(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    draws, vocab = 3000, SHAPE.config.vocab_size
    row = torch.linspace(0, 1, vocab)[torch.randperm(vocab, generator=torch.Generator().manual_seed(0))]
    monkeypatch.setattr(Shape, "random", lambda self, *sizes: row.repeat(draws, 1))
    torch.manual_seed(0)
    drawn = CASES[name](SHAPE).forms["torch"]().flatten()  # type: ignore[attr-defined]
    sampler = Sampler(vocab, SHAPE.device)
    request = Req(0, torch.zeros(1, dtype=torch.int32), SamplingParams(temperature=0.6, seed=0, **ASKED[name]), 0)
    apart = sampler.prepare([request]).apart
    scores = row[None] * (1 if name.endswith("flat") else 3) / 0.6
    left = scores if apart is None else sampler.filters.apply(scores.clone(), apart.args)
    assert left[0, drawn].isfinite().all(), "drew what is filtered out"
    worst = scores.masked_fill(left == -torch.inf, torch.inf)[0].topk(vocab // 20, largest=False).indices
    assert torch.isin(drawn, worst).any(), "the least likely of those that stay were never drawn"
