"""Every stage gives transformers' greedy tokens on real prompts, whatever its pages, cache, chunks and overlap."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from prompts import MIN_GAP

from minisgl.core.sampling_params import SamplingParams

from .conftest import NEW_TOKENS, Expected

# Pairwise over page size, cache, chunk and overlap; the full matrix runs on tiny models.
VARIANTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (3, {"page_size": 16}),
    (3, {"page_size": 1}),
    (4, {"page_size": 16, "cache": "radix"}),
    (4, {"page_size": 64, "cache": "naive"}),
    (5, {"page_size": 16, "cache": "radix", "max_prefill_length": 32}),
    (5, {"page_size": 1, "cache": "radix", "max_prefill_length": 16}),
    (5, {"page_size": 64, "cache": "naive", "max_prefill_length": 33}),
    (6, {"page_size": 16, "cache": "radix"}),
    (7, {"page_size": 16, "cache": "radix", "max_prefill_length": 32}),
    (7, {"page_size": 1, "cache": "naive", "max_prefill_length": 31}),
    (7, {"page_size": 64, "cache": "radix", "disable_overlap": True}),
]


def run(stage: int, prompts: list[list[int]], max_tokens: int = NEW_TOKENS, **options: Any) -> list[list[int]]:
    llm_class = importlib.import_module(f"minisgl.stage{stage}.llm").LLM
    if stage >= 3:
        options = {"num_pages": 2048 // options.get("page_size", 16), **options}
    with llm_class(dtype="float32", max_seq_len=512, **options) as llm:
        found = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        again = llm.generate(prompts[:1], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        assert again[0].token_ids == found[0].token_ids, "the second call differs: state was left behind"
        check_whole(llm)
    return [completion.token_ids for completion in found]


def check_whole(llm: Any) -> None:
    """Nothing is held when nothing runs."""
    stats = llm.stats()
    if stats:
        assert stats["pages_free"] + stats.get("pages_cached", 0) == stats["pages_total"]


def test_prompts_are_fit_for_comparison(expected: Expected) -> None:
    assert min(expected.gaps) >= MIN_GAP, f"a near tie: {expected.gaps}"


def test_stage_1(expected: Expected) -> None:
    """Quadratic, so only a few tokens of a few prompts."""
    chosen = (1, 3, 4)
    found = run(1, [expected.prompts[i] for i in chosen], max_tokens=4)
    assert found == [expected.answers[i][:4] for i in chosen]


@pytest.mark.parametrize(("stage", "options"), VARIANTS, ids=lambda value: str(value).replace("'", ""))
def test_batched(stage: int, options: dict[str, Any], expected: Expected) -> None:
    assert run(stage, expected.prompts, **options) == expected.answers


@pytest.mark.parametrize("stage", [3, 5, 7])
def test_alone(stage: int, expected: Expected) -> None:
    assert run(stage, expected.prompts[:1]) == expected.answers[:1]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "options"), [(6, {}), (7, {}), (7, {"disable_overlap": True, "page_size": 1})])
def test_tensor_parallel(stage: int, options: dict[str, Any], expected: Expected) -> None:
    """9 heads and 3 KV heads on two ranks."""
    assert run(stage, expected.prompts, tp=2, **options) == expected.answers
