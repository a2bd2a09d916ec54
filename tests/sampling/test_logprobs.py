"""What is measured of logits, and that it comes back from one tensor of integers as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.core.req import ChunkedReq, Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.sampling.logprobs import LogprobsOnHost
from minisgl.sampling.sampler import Sampler

CPU = torch.device("cpu")


def as_they_are(logits: Tensor) -> Tensor:
    return logits


def req(length: int, **params: Any) -> Req:
    return Req(0, torch.arange(length, dtype=torch.int32), SamplingParams(**params), table_idx=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_the_models_logits_before_anything_changes_them(dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(4, 3000, generator=torch.Generator().manual_seed(0))).to(dtype)
    hot = {"temperature": 3.0, "top_k": 5, "seed": 1, "repetition_penalty": 2.0}
    asking = [req(3, logprobs=2), req(4), req(5, logprobs=20, **hot), req(6, logprobs=0, logit_bias={7: 100.0})]
    sampler = Sampler(3000, CPU)
    args = sampler.prepare(asking)
    assert args.logprobs is not None
    tokens = sampler.sample(logits, args)
    sampled, prompts = LogprobsOnHost(args.logprobs, args.logprobs.measure(logits, tokens, as_they_are)).read()
    assert list(sampled) == [0, 2, 3]
    assert prompts == {}
    expected = logits.double().log_softmax(dim=1)
    for row, found in sampled.items():
        top = asking[row].sampling_params.logprobs
        assert found.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        assert [logprob for _, logprob in found.top] == pytest.approx(expected[row].topk(top).values.tolist(), abs=1e-5)
        assert [float(expected[row, i]) for i, _ in found.top] == pytest.approx([p for _, p in found.top], abs=1e-5)
    assert int(tokens[3]) == 7, "the bias chose it"
    assert sampled[3].logprob < -3, "and is not in its logprob"


def test_more_rows_than_are_measured_at_once() -> None:
    logits = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    args = Sampler(40, CPU).prepare([req(2, logprobs=row % 3) if row % 4 else req(2) for row in range(300)])
    assert args.logprobs is not None
    tokens, gathered = torch.arange(300, dtype=torch.int32) % 40, []

    def gather(rows: Tensor) -> Tensor:
        gathered.append(len(rows))
        return rows

    sampled = LogprobsOnHost(args.logprobs, args.logprobs.measure(logits, tokens, gather)).read()[0]
    assert gathered == [128, 97], "ranks exchange the rows that are asked for, and no others"
    expected = logits.double().log_softmax(dim=1)
    assert list(sampled) == [row for row in range(300) if row % 4]
    for row, found in sampled.items():
        assert found.logprob == pytest.approx(float(expected[row, row % 40]), abs=1e-5)
        assert len(found.top) == row % 3


def test_prompts_tokens_are_those_that_have_a_next_one() -> None:
    """A decode row, a silent prompt, a first chunk, a last one, and a prompt of one token."""
    asked: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": True}
    decode = req(6, **asked)
    decode.complete_one()
    chunk = ChunkedReq(0, torch.arange(9, dtype=torch.int32), SamplingParams(**asked), 0, chunk_end=4)
    last = Req(0, torch.arange(20, 29, dtype=torch.int32), SamplingParams(**asked), 0, cached_len=6)
    args = Sampler(50, CPU).prepare([decode, req(3), chunk, last, req(1, **asked)])
    assert args.logprobs is not None
    assert args.logprobs.rows.tolist() == [0, 3, 4], "nothing is sampled from a chunk"
    prompts = args.logprobs.prompts
    assert prompts is not None
    assert prompts.counts == {2: (4, 1), 3: (2, 1)}
    assert prompts.indices.tolist() == [4, 5, 6, 7, 8, 9]
    assert prompts.next_ids.tolist() == [1, 2, 3, 4, 27, 28]


def test_tokens_of_an_answer_computed_again_are_not_a_prompts() -> None:
    asked = SamplingParams(logprobs=1, prompt_logprobs=True)
    retracted = Req(0, torch.arange(9, dtype=torch.int32), asked, 0, prompt_len=5)
    args = Sampler(50, CPU).prepare([retracted])
    assert args.logprobs is not None
    assert args.logprobs.prompts is None


def test_a_small_vocabulary_has_no_more() -> None:
    sampler = Sampler(3, CPU)
    args = sampler.prepare([req(1, logprobs=20)])
    assert args.logprobs is not None
    measured = args.logprobs.measure(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0], dtype=torch.int32), as_they_are)
    found = LogprobsOnHost(args.logprobs, measured).read()[0][0]
    assert [token_id for token_id, _ in found.top] == [1, 2, 0]


def test_nothing_is_measured_for_nobody() -> None:
    assert Sampler(3, CPU).prepare([req(1), req(2, presence_penalty=1.0)]).logprobs is None
