"""Every stage gives transformers' greedy tokens on real prompts, whatever its pages, cache, chunks and overlap."""

from __future__ import annotations

import importlib
import itertools
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prompts import EMOJI, MIN_GAP, PLANETS, TEXTS
from transformers import AutoTokenizer

from minisgl.core.sampling_params import SamplingParams

from .conftest import NEW_TOKENS, Expected

# Pairwise over PAIRED, and chunks of several lengths; the full matrix runs on tiny models.
VARIANTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (3, {"page_size": 16}),
    (3, {"page_size": 1}),
    (4, {"page_size": 16, "cache": "radix"}),
    (4, {"page_size": 16, "cache": "naive"}),
    (5, {"page_size": 16, "cache": "radix", "max_prefill_length": 32}),
    (5, {"page_size": 1, "cache": "radix", "max_prefill_length": 16}),
    (5, {"page_size": 64, "cache": "naive", "max_prefill_length": 33}),
    (6, {"page_size": 16, "cache": "radix"}),
    (7, {"page_size": 16, "cache": "radix", "max_prefill_length": 32}),
    (7, {"page_size": 1, "cache": "naive", "max_prefill_length": 31}),
    (7, {"page_size": 64, "cache": "radix", "disable_overlap": True}),
]
SERVER: tuple[int, dict[str, Any]] = (8, {"page_size": 64, "cache": "radix", "max_prefill_length": 32})
TENSOR_PARALLEL: list[tuple[int, dict[str, Any]]] = [
    (6, {}),
    (7, {"page_size": 64, "cache": "naive"}),
    (7, {"page_size": 1, "disable_overlap": True}),
    (8, {"page_size": 16, "cache": "radix"}),
]
PAIRED: dict[str, tuple[Any, ...]] = {
    "page_size": (1, 16, 64),
    "cache": ("naive", "radix"),
    "disable_overlap": (False, True),
    "tp": (1, 2),
}


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


@pytest.mark.slow
def test_the_servers_processes(expected: Expected) -> None:
    stage, options = SERVER
    assert run(stage, expected.prompts, **options) == expected.answers


@pytest.mark.parametrize("stage", [3, 5, 7])
def test_alone(stage: int, expected: Expected) -> None:
    assert run(stage, expected.prompts[:1]) == expected.answers[:1]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "options"), TENSOR_PARALLEL, ids=lambda value: str(value).replace("'", ""))
def test_tensor_parallel(stage: int, options: dict[str, Any], expected: Expected) -> None:
    """9 heads and 3 KV heads on two ranks."""
    assert run(stage, expected.prompts, tp=2, **options) == expected.answers


def test_every_stage_is_compared_and_every_pair_of_settings() -> None:
    """Of those that have them all: earlier stages know no cache, or cannot be cut."""
    assert {stage for stage, _ in TENSOR_PARALLEL} == {6, 7, 8}, "a stage is not cut"
    variants = [*VARIANTS, SERVER, *((stage, options | {"tp": 2}) for stage, options in TENSOR_PARALLEL)]
    assert {1, *(stage for stage, _ in variants)} == set(range(1, 9)), "a stage is not compared"
    seen = [settings(stage, options) for stage, options in variants if stage >= 4]
    for (one, values), (other, others) in itertools.combinations(PAIRED.items(), 2):
        for pair in itertools.product(values, others):
            assert pair in [(found[one], found[other]) for found in seen], f"{one}, {other}: nobody runs {pair}"


def settings(stage: int, options: dict[str, Any]) -> dict[str, Any]:
    """What a variant runs with. Before stage 7 nothing overlaps, and before stage 6 there is one rank."""
    config = importlib.import_module(f"minisgl.stage{stage}.llm").LLM.config_class(**options)
    earlier = {"disable_overlap": True, "tp": 1}
    return {name: getattr(config, name, earlier.get(name)) for name in PAIRED}


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(1, 9))
def test_the_command_line(stage: int, expected: Expected, model_folder: Path) -> None:
    """Standard output has one object a prompt and nothing else; and the server's command opens no port for it."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    command = [sys.executable, "-m", f"minisgl.stage{stage}", "--prompt", EMOJI, "--prompt", PLANETS]
    command += ["--dtype", "float32", "--temperature", "0", "--max-tokens", str(NEW_TOKENS), "--ignore-eos"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = ["--port", str(taken.getsockname()[1])] if stage == 8 else []
        done = subprocess.run([*command, *port, "--output", "json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {
            "text": tokenizer.decode(expected.answers[number]),
            "token_ids": expected.answers[number],
            "finish_reason": "length",
            "prompt_tokens": len(expected.prompts[number]),
            "cached_tokens": 0,
        }
        for number in (TEXTS.index(EMOJI), TEXTS.index(PLANETS))
    ]
