"""Tokens from shards of the logits: those that a sampler chooses from all of them, on every rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import ThreadCommunicator, on_ranks
from torch import Tensor

from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.layers.shard import shard_range
from minisgl.sampling.sampler import Sampler
from minisgl.sampling.vocab_parallel import VocabParallelSampler, sort_keys, tokens_of

CPU = torch.device("cpu")
PLAIN = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=5),
    SamplingParams(temperature=1.5, seed=6),
    SamplingParams(temperature=0.9, seed=7, top_k=1),
]
FILTERED = [dataclasses.replace(PLAIN[1], **change) for change in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3})]


class Listening(ThreadCommunicator):
    """Counts the values that cross."""

    gathered = 0

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        self.gathered += x.numel()
        return super().all_gather(x, sizes)


def reqs(params: list[SamplingParams], step: int) -> list[Req]:
    return [Req(i, torch.zeros(step + i + 1, dtype=torch.int32), p, i) for i, p in enumerate(params)]


def on_shards(size: int, logits: list[Tensor], params: list[SamplingParams]) -> tuple[list[Tensor], int]:
    """The tokens of each step, the same on all ranks, and how many values a rank gave."""
    vocab = logits[0].shape[1]

    def work(comm: ThreadCommunicator) -> tuple[list[Tensor], int]:
        comm.__class__ = Listening
        assert isinstance(comm, Listening)
        sampler, own = VocabParallelSampler(vocab, CPU, False, comm), shard_range(vocab, comm.rank, size)
        steps = enumerate(logits)
        chosen = [sampler.sample(x[:, own.start : own.stop], sampler.prepare(reqs(params, i))) for i, x in steps]
        return chosen, comm.gathered

    ranks = on_ranks(size, work)
    for tokens, _ in ranks:
        assert all(torch.equal(a, b) for a, b in zip(tokens, ranks[0][0], strict=True)), "ranks chose differently"
    return ranks[0]


def from_all(logits: list[Tensor], params: list[SamplingParams]) -> list[Tensor]:
    sampler = Sampler(logits[0].shape[1], CPU)
    return [sampler.sample(x, sampler.prepare(reqs(params, i))) for i, x in enumerate(logits)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_rows_without_filters_give_one_number_each(size: int, dtype: torch.dtype) -> None:
    """bfloat16 logits tie often: 1000 of them in the same two hundred values."""
    torch.manual_seed(0)
    logits = [torch.randn(len(PLAIN), 1001).to(dtype) for _ in range(40)]
    for params in (PLAIN, PLAIN[:1] * 4):
        tokens, gathered = on_shards(size, logits, params)
        assert all(torch.equal(a, b) for a, b in zip(tokens, from_all(logits, params), strict=True))
        assert gathered == len(logits) * len(params)


@pytest.mark.parametrize(
    "params", [*FILTERED, SamplingParams(logit_bias={3: 100.0}), SamplingParams(presence_penalty=2)]
)
def test_only_rows_that_need_it_are_gathered(params: SamplingParams) -> None:
    """And then all rows give a number each. Where all need it, that is all that crosses."""
    torch.manual_seed(0)
    logits = [torch.randn(3, 50)]
    batch = [PLAIN[1], params, SamplingParams()]
    tokens, gathered = on_shards(2, logits, batch)
    assert torch.equal(tokens[0], from_all(logits, batch)[0])
    assert gathered == 25 + 3
    tokens, gathered = on_shards(2, logits, [params] * 3)
    assert torch.equal(tokens[0], from_all(logits, [params] * 3)[0])
    assert gathered == 3 * 25


def test_a_bias_wins_on_another_rank() -> None:
    logits = [torch.tensor([[0.0, 1.0, 2.0, 3.0]])]
    params = SamplingParams(logit_bias={0: 100.0})
    assert on_shards(2, logits, [params])[0][0].tolist() == [0]


def test_equals_go_to_the_lowest_token() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [-0.0, -1.0, 0.0, -2.0], [-1.0, -1.0, 0.0, -0.0], [-9.0] * 4])
    assert on_shards(2, [logits], [SamplingParams()] * 4)[0][0].tolist() == [1, 0, 2, 0]


floats = st.floats(allow_nan=False, width=32)
token_ids = st.integers(0, 2**31 - 1)


@given(st.tuples(floats, token_ids), st.tuples(floats, token_ids))
def test_keys_order_as_scores_and_then_as_lower_tokens(one: tuple[float, int], other: tuple[float, int]) -> None:
    scores, tokens = (torch.tensor(column) for column in zip(one, other, strict=True))
    keys = sort_keys(scores.float(), tokens)
    assert tokens_of(keys).tolist() == tokens.tolist()
    expected = (one[0], -one[1]) > (other[0], -other[1])
    assert bool(keys[0] > keys[1]) == expected
