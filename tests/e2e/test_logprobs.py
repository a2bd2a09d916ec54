"""Logprobs of answers and prompts are transformers' in every loop, pool, chunk and rank, and are reported once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from thread_engine import make_scheduler, serve
from thread_ranks import on_ranks
from tiny_model import make_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from minisgl.core.llm import Request
from minisgl.core.outputs import TokenLogprob, TokenOutput
from minisgl.core.protocols import Communicator, NoCommunicator
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage6.messages import AddRequests, Order, Outputs, Report, encode

from .test_penalties import EOS, OPTIONS, PARAMS, PROMPTS

ASKED: list[dict[str, Any]] = [
    {"logprobs": 4, "prompt_logprobs": True},
    {"logprobs": 20},
    {"logprobs": 0, "prompt_logprobs": True},
    {"logprobs": 2, "prompt_logprobs": True},
    {},
    {"logprobs": 1, "prompt_logprobs": True},  # of a prompt of one token
]
ASKING = [replace(params, **asked) for params, asked in zip(PARAMS, ASKED, strict=True)]
ALONE = [*PROMPTS[:4], PROMPTS[5], PROMPTS[4]]  # the last is of one token
TOLERANCE = 1e-4

Reference = Callable[[list[int]], Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """Ids to float64 [len(ids), vocab]: the logprobs of what comes after each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def logprobs(ids: list[int]) -> Tensor:
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    return logprobs


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int | None]]:
    """The tokens when nobody asks."""
    outputs = serve(make_scheduler(folder, NoCommunicator(), EOS, OPTIONS), ALONE, PARAMS)
    return [[output.token_id for output in each] for each in outputs]


def check_entry(found: TokenLogprob, token_id: int, expected: Tensor, top: int) -> None:
    assert found.logprob == pytest.approx(float(expected[token_id]), abs=TOLERANCE)
    assert len(found.top) == top
    best = expected.topk(top).values.tolist()
    for (best_id, logprob), value in zip(found.top, best, strict=True):
        assert logprob == pytest.approx(value, abs=TOLERANCE)
        assert logprob == pytest.approx(float(expected[best_id]), abs=TOLERANCE)


def check(outputs: list[list[TokenOutput]], reference: Reference) -> None:
    for prompt, params, each in zip(ALONE, ASKING, outputs, strict=True):
        if params.logprobs is None:
            assert all(output.logprob is None and output.prompt_logprobs is None for output in each)
            continue
        answer = [output.token_id for output in each if output.token_id is not None]
        expected = reference(prompt + answer)
        for place, output in enumerate(each):
            assert output.logprob is not None
            check_entry(output.logprob, answer[place], expected[len(prompt) + place - 1], params.logprobs)
        sent = [output.prompt_logprobs for output in each if output.prompt_logprobs is not None]
        assert len(sent) == params.prompt_logprobs, "reported once, if it was asked for"
        if params.prompt_logprobs:
            assert sent == [each[0].prompt_logprobs]
            first, *others = sent[0]
            assert first is None
            for place, found in enumerate(others, 1):
                assert found is not None
                check_entry(found, prompt[place], expected[place - 1], params.logprobs)
            assert len(others) == len(prompt) - 1
            assert {output.cached_tokens for output in each} == {0}


def run(folder: Path, comm: Communicator, **options: Any) -> tuple[list[list[TokenOutput]], int]:
    """In a scheduler that has the prompts in its prefix cache, and expects short answers."""
    scheduler = make_scheduler(folder, comm, EOS, {**OPTIONS, **options})
    serve(scheduler, ALONE, [SamplingParams(max_tokens=1)] * len(ALONE))
    scheduler.admission.note_finished(1)
    return serve(scheduler, ALONE, ASKING), scheduler.retractions


@pytest.mark.parametrize(
    ("chunk", "page_size", "policy", "overlap"),
    [
        (2048, 4, "mixed", True),
        (2048, 1, "prefill-first", False),
        (32, 4, "prefill-first", True),
        (7, 1, "mixed", True),
        (7, 4, "mixed", False),
        (1, 4, "prefill-first", True),
    ],
)
def test_loops(folder: Path, plain: Any, reference: Reference, chunk: int, page_size: int, policy: str, overlap: bool):
    options = {"max_prefill_length": chunk, "page_size": page_size, "num_pages": 800 // page_size}
    outputs, _ = run(folder, NoCommunicator(), schedule_policy=policy, disable_overlap=not overlap, **options)
    assert [[output.token_id for output in each] for each in outputs] == plain
    check(outputs, reference)


@pytest.mark.parametrize(
    ("cache", "chunk", "overlap"), [("naive", 2048, True), ("radix", 7, True), ("naive", 7, False)]
)
def test_retraction(folder: Path, plain: Any, reference: Reference, cache: str, chunk: int, overlap: bool) -> None:
    options = {"num_pages": 20, "max_prefill_length": chunk, "cache": cache}
    outputs, retractions = run(folder, NoCommunicator(), disable_overlap=not overlap, **options)
    assert retractions > 0
    assert [[output.token_id for output in each] for each in outputs] == plain
    check(outputs, reference)


def test_two_ranks(folder: Path, plain: Any, reference: Reference) -> None:
    ranks = on_ranks(2, lambda comm: run(folder, comm, max_prefill_length=16))
    for outputs, _ in ranks:
        assert [[output.token_id for output in each] for each in outputs] == plain
        check(outputs, reference)
    assert ranks[0] == ranks[1]


def test_a_long_prompts_logits_are_made_in_slices(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler(folder, NoCommunicator(), EOS, OPTIONS)
    rows: list[int] = []
    head = scheduler.engine.model.lm_head.forward
    monkeypatch.setattr(scheduler.engine.model.lm_head, "forward", lambda x: (rows.append(len(x)), head(x))[1])
    prompt = [(7 * i) % 250 for i in range(200)]
    asked = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=True)
    outputs = serve(scheduler, [prompt], [asked])[0]
    assert rows == [1, 128, 71, 1], "the last token, the 199 that have a next one, and a step of decode"
    found = outputs[0].prompt_logprobs
    assert found is not None
    expected = reference(prompt)
    for place in (1, 127, 128, 129, 199):
        check_entry(found[place], prompt[place], expected[place - 1], 1)  # type: ignore[arg-type]


def test_what_was_computed_for_logprobs_is_cached_for_others(folder: Path) -> None:
    scheduler = make_scheduler(folder, NoCommunicator(), EOS, {**OPTIONS, "page_size": 1, "num_pages": 400})
    asked = SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=True)
    for params, cached in ((asked, 0), (asked, 0), (SamplingParams(max_tokens=1), len(PROMPTS[0]) - 1)):
        assert serve(scheduler, [PROMPTS[0]], [params])[0][0].cached_tokens == cached


@pytest.mark.parametrize("overlap", [False, True])
def test_a_half_done_prompt_that_begins_anew_reports_once(folder: Path, reference: Reference, overlap: bool) -> None:
    """Request 0 grows until there is no page left for 1, which is cut in chunks and has reported nothing yet."""
    options = {"num_pages": 20, "max_prefill_length": 2, "cache": "naive", "disable_overlap": not overlap}
    scheduler = make_scheduler(folder, NoCommunicator(), EOS, {**OPTIONS, **options})
    scheduler.admission.note_finished(1)
    half_done: list[bool] = []
    retract = scheduler._retract
    scheduler._retract = lambda req: (half_done.append(req.output_len == 0), retract(req))[1]  # type: ignore[method-assign]
    params = [SamplingParams(max_tokens=50, ignore_eos=True, logprobs=0), ASKING[0]]
    prompts = [[5, 6, 7], list(range(60))]
    params[1] = replace(params[1], max_tokens=4)
    scheduler.admission.pages = lambda *lengths: 0  # let it in though there is no room  # type: ignore[method-assign]
    outputs = serve(scheduler, prompts, params)[1]
    assert True in half_done
    found = outputs[0].prompt_logprobs
    assert found is not None
    assert len(found) == 60
    expected = reference(prompts[1])
    for place in range(1, 60):
        check_entry(found[place], place, expected[place - 1], 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [5, 6, 7])
def test_completions_have_them(folder: Path, reference: Reference, stage: int) -> None:
    llm_class = import_module(f"minisgl.stage{stage}.llm").LLM
    with llm_class(str(folder), dtype="float32", device="cpu", max_seq_len=256, **OPTIONS) as llm:
        asking, silent = llm.generate(ALONE[:2], [ASKING[0], SamplingParams(max_tokens=3)])
    assert silent.logprobs is silent.prompt_logprobs is None
    expected = reference(ALONE[0] + asking.token_ids)
    for place, found in enumerate(asking.logprobs or [], len(ALONE[0])):
        check_entry(found, asking.token_ids[place - len(ALONE[0])], expected[place - 1], 4)
    assert asking.logprobs is not None
    assert len(asking.logprobs) == len(asking.token_ids)
    assert asking.prompt_logprobs is not None
    assert len(asking.prompt_logprobs) == len(ALONE[0])


def test_they_cross_processes(plain: Any, folder: Path, reference: Reference) -> None:
    """As one output message of a rank, with all that may stand in it."""
    outputs = serve(make_scheduler(folder, NoCommunicator(), EOS, OPTIONS), ALONE, ASKING)
    sent = encode(Outputs([output for each in outputs for output in each]))
    received = msgspec.msgpack.decode(sent, type=Report)
    assert received.outputs == [output for each in outputs for output in each]
    requests = [Request(uid, *pair) for uid, pair in enumerate(zip(ALONE, ASKING, strict=True))]
    assert msgspec.msgpack.decode(encode(AddRequests(requests)), type=Order).requests == requests


@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_earlier_stages_refuse(folder: Path, stage: int) -> None:
    with import_module(f"minisgl.stage{stage}.llm").LLM(str(folder), device="cpu", max_seq_len=64) as llm:
        with pytest.raises(ValueError, match="logprobs are given by stages 5 to 8"):
            llm.generate("a", SamplingParams(max_tokens=1, logprobs=1))
        assert len(llm.generate("a", SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids) == 1
