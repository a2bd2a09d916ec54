"""Penalties, biases, min_tokens and stop ids give the same answers in every stage, loop, pool, chunk and rank."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from penalty_reference import penalized
from thread_engine import make_scheduler, serve
from thread_ranks import on_ranks
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from minisgl.core.protocols import Communicator, NoCommunicator
from minisgl.core.sampling_params import SamplingParams

EOS = frozenset({257})
PROMPTS = [list(b"the cat sat on the mat, the cat"), [7, 8, 9], list(range(100, 140)), list(b"a a a a"), [1], [50, 60]]
FEW = {65: 25.0, 66: 25.0, 67: 20.0, 68: -100.0}  # tokens that then often follow themselves: the last one counts
PARAMS = [
    SamplingParams(max_tokens=40, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(max_tokens=30, frequency_penalty=1.5, presence_penalty=1.0, logit_bias=FEW),
    SamplingParams(max_tokens=30, min_tokens=9, logit_bias={257: 60.0, 200: 30.0}, stop_token_ids=(200,)),
    SamplingParams(
        temperature=0.9, top_p=0.9, seed=5, max_tokens=40, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias=FEW
    ),
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=6, max_tokens=35, ignore_eos=True, frequency_penalty=0.7, min_tokens=3),
]
OPTIONS: dict[str, Any] = {"max_running_requests": 8, "page_size": 4, "num_pages": 200}
MIN_GAP = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[list[int], str]]:
    """Stage 1's answers, of which the greedy ones are checked: transformers' logits, changed in float64."""
    with import_module("minisgl.stage1.llm").LLM(str(folder), dtype="float32", device="cpu", max_seq_len=256) as llm:
        found = [(c.token_ids, str(c.finish_reason)) for c in llm.generate(PROMPTS, PARAMS)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, params, (answer, _) in zip(PROMPTS, PARAMS, found, strict=True):
        if not params.is_greedy:
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        for place, token_id in enumerate(answer, len(prompt)):
            changed = penalized(logits[place - 1], params, (prompt + answer)[:place], len(prompt), EOS)
            best = changed.topk(2)
            assert float(best.values[0] - best.values[1]) > MIN_GAP, "a near tie: take another prompt"
            assert int(best.indices[0]) == token_id
    return found


def test_the_answers_are_worth_comparing(expected: list[tuple[list[int], str]]) -> None:
    """Something is penalized, an end is put off as long as it must be and not longer, a stop id ends."""
    assert all(reason == ("stop" if i == 2 else "length") for i, (_, reason) in enumerate(expected))
    answer = expected[2][0]
    assert len(answer) == 10
    assert answer[-1] in (200, 257)
    for answer in (expected[1][0], expected[3][0]):
        assert {65, 66, 67} <= set(answer)
        repeats = [a == b for a, b in pairwise(answer)]
        assert 5 < sum(repeats) < len(repeats) - 5


@pytest.mark.parametrize("stage", [2, 3, 4, 5])
def test_stages(folder: Path, expected: list[tuple[list[int], str]], stage: int) -> None:
    module = import_module(f"minisgl.stage{stage}.llm")
    options = OPTIONS if stage > 2 else {}
    with module.LLM(str(folder), dtype="float32", device="cpu", max_seq_len=256, **options) as llm:
        for _ in range(2):  # the second time with what is cached
            assert [(c.token_ids, c.finish_reason) for c in llm.generate(PROMPTS, PARAMS)] == expected


def answers(folder: Path, comm: Communicator, options: dict[str, Any]) -> Any:
    scheduler = make_scheduler(folder, comm, EOS, {**OPTIONS, **options})
    scheduler.admission.note_finished(1)  # answers are expected to be short: too many are let in
    outputs = serve(scheduler, PROMPTS, PARAMS)
    return [([o.token_id for o in each], each[-1].finish_reason) for each in outputs], scheduler.retractions


@pytest.mark.parametrize(
    ("changes", "policy", "overlap"),
    [
        ({}, "mixed", True),
        ({}, "prefill-first", False),
        ({"page_size": 1, "num_pages": 512}, "prefill-first", True),
        ({"max_prefill_length": 7}, "mixed", False),
        ({"max_prefill_length": 7}, "prefill-first", True),
        ({"max_prefill_length": 1}, "mixed", True),
    ],
)
def test_loops(folder: Path, expected: Any, changes: dict[str, Any], policy: str, overlap: bool) -> None:
    options = {"schedule_policy": policy, "disable_overlap": not overlap, **changes}
    assert answers(folder, NoCommunicator(), options)[0] == expected


@pytest.mark.parametrize(("chunk", "overlap"), [(2048, True), (7, True), (7, False)])
def test_retraction(folder: Path, expected: Any, chunk: int, overlap: bool) -> None:
    options = {"num_pages": 22, "disable_overlap": not overlap, "max_prefill_length": chunk, "cache": "naive"}
    found, retractions = answers(folder, NoCommunicator(), options)
    assert retractions > 0
    assert found == expected


def test_two_ranks(folder: Path, expected: Any) -> None:
    for found, _ in on_ranks(2, lambda comm: answers(folder, comm, {})):
        assert found == expected
