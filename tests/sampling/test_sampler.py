"""The sampler: greedy rows, seeds, independence of the batch, and filters against transformers' own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from minisgl.core.req import ChunkedReq, Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.sampling.args import BatchSamplingArgs, RowsApart
from minisgl.sampling.filters import TokenFilters
from minisgl.sampling.sampler import Sampler

CPU = torch.device("cpu")


def req(uid: int, position: int, **params: object) -> Req:
    return Req(uid, torch.zeros(position, dtype=torch.int32), SamplingParams(**params), table_idx=uid)  # type: ignore[arg-type]


def sample(logits: Tensor, reqs: list[Req]) -> list[int]:
    sampler = Sampler(logits.shape[1], CPU)
    before = logits.clone()
    tokens = sampler.sample(logits, sampler.prepare(reqs))
    assert tokens.dtype == torch.int32
    assert tokens.shape == (len(reqs),)
    assert torch.equal(logits, before), "the caller's logits were changed"
    return tokens.tolist()


def allowed(logits: Tensor, reqs: list[Req]) -> Tensor:
    """bool [rows, vocab]: what the filters leave."""
    apart = Sampler(logits.shape[1], CPU).prepare(reqs).apart
    left = torch.ones_like(logits, dtype=torch.bool)
    if apart is not None:
        assert apart.args.temperatures is not None
        scores = logits[apart.rows].float() / apart.args.temperatures[:, None]
        left[apart.rows] = TokenFilters().apply(scores, apart.args) > -torch.inf
    return left


def test_an_all_greedy_batch_needs_nothing() -> None:
    reqs = [req(0, 3), req(1, 4, temperature=0.0, top_p=0.5, top_k=3, min_p=0.1), req(2, 5, temperature=2.0, top_k=1)]
    args = Sampler(10, CPU).prepare(reqs)
    assert args == BatchSamplingArgs() or all(
        getattr(args, f.name) in (None, 0, False) for f in dataclasses.fields(args)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_highest(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-5.0, -7.0, -5.0, -5.0], [1.0, 2.0, 3.0, 4.0]], dtype=dtype)
    assert sample(logits, [req(i, 1) for i in range(3)]) == [1, 0, 3]


@pytest.mark.parametrize("vocab", [7, 1000, 49152])
def test_greedy_rows_of_a_mixed_batch_take_their_argmax(vocab: int) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    reqs = [
        req(0, 5, temperature=0.0, top_p=0.1),
        req(1, 5, temperature=5.0, seed=3),
        req(2, 5, temperature=9.0, top_k=1),
        req(3, 5, temperature=0.0, top_k=3, min_p=0.9),
    ]
    tokens = sample(logits, reqs)
    best = logits.argmax(dim=1).tolist()
    assert [tokens[i] for i in (0, 2, 3)] == [best[i] for i in (0, 2, 3)], "temperature 0 and top_k 1 are argmax"


def test_a_row_that_draws_without_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"requests \[7\].*no seed"):
        Sampler(10, CPU).prepare([req(3, 1), req(7, 2, temperature=1.0)])


def test_a_chunk_draws_nothing() -> None:
    chunk = ChunkedReq(0, torch.zeros(8, dtype=torch.int32), SamplingParams(temperature=1.0), 0, chunk_end=4)
    assert Sampler(10, CPU).prepare([chunk]).temperatures is None


def test_the_position_is_that_of_the_token_to_be_drawn() -> None:
    request = req(0, 5, temperature=1.0, seed=1)
    sampler = Sampler(10, CPU)
    assert sampler.prepare([request]).positions.tolist() == [5]  # type: ignore[union-attr]
    request.complete_one()
    assert sampler.prepare([request]).positions.tolist() == [6]  # type: ignore[union-attr]


params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-30, 0.3, 1.0, 3.0]),
        "top_k": st.sampled_from([-1, 1, 2, 5, 50, 300, 10**6]),
        "top_p": st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        "seed": st.integers(0, 2**63 - 1),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(params, min_size=2, max_size=5), st.sampled_from([3, 40, 700, 6000]), st.booleans(), st.integers(0, 99))
def test_an_answer_does_not_depend_on_the_batch(rows: list[dict], vocab: int, ties: bool, seed: int) -> None:
    logits = 4 * torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed))
    if ties:
        logits = logits.round()
    reqs = [req(i, 3 + i, **row) for i, row in enumerate(rows)]
    together = sample(logits, reqs)
    assert together == [sample(logits[i : i + 1], [reqs[i]])[0] for i in range(len(rows))]
    assert together[::-1] == sample(logits.flip(0), reqs[::-1])


@settings(max_examples=100, deadline=None)
@given(
    params.filter(lambda p: p["temperature"] > 0.1 and p["top_k"] != 1),
    st.sampled_from([3, 300, 6000]),
    st.integers(0, 99),
)
def test_filters_leave_what_transformers_leaves(row: dict, vocab: int, seed: int) -> None:
    logits = 3 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
    scores = TemperatureLogitsWarper(row["temperature"])(None, logits)
    if row["top_k"] > 0:
        scores = TopKLogitsWarper(row["top_k"])(None, scores)
    if row["top_p"] < 1:
        scores = TopPLogitsWarper(row["top_p"])(None, scores)
    if row["min_p"] > 0:
        scores = MinPLogitsWarper(row["min_p"])(None, scores)
    ours = allowed(logits, [req(i, 1, **row) for i in range(3)])
    differ = ours != (scores > -torch.inf)
    # Sums of float32 in another order: the one token at the border of the nucleus may fall either way.
    at_most = 1 if row["top_p"] < 1 else 0
    assert int(differ.sum(dim=1).max()) <= at_most, f"{row}: {differ.sum(dim=1).tolist()} tokens differ"


def test_filters_by_hand() -> None:
    """Probabilities 0.5, 0.25, 0.125, 0.125: 0.74 is two tokens, 0.76 a third, and that ties with the fourth."""
    logits = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()
    left = lambda **p: allowed(logits, [req(0, 1, temperature=1.0, seed=0, **p)])[0].nonzero().flatten().tolist()  # noqa: E731
    assert left(top_k=2) == [1, 3]
    assert left(top_k=3) == [0, 1, 2, 3], "what ties with the k-th stays"
    assert left(top_p=0.4) == [1], "the first always stays"
    assert left(top_p=0.74) == [1, 3]
    assert left(top_p=0.76) == [0, 1, 2, 3]
    assert left(top_k=2, top_p=0.6) == [1], "top-p counts what top-k left: 0.5 of 0.75 is two thirds"
    assert left(min_p=0.5) == [1, 3]
    assert left(min_p=0.51) == [1]
    assert left(min_p=0.25) == [0, 1, 2, 3]


def test_a_flat_distribution_needs_the_full_sort() -> None:
    logits = torch.linspace(0, 1, 6000)[torch.randperm(6000, generator=torch.Generator().manual_seed(0))][None]
    row = allowed(logits, [req(0, 1, temperature=1.0, seed=0, top_p=0.9)])
    expected = TopPLogitsWarper(0.9)(None, logits) > -torch.inf
    assert int(row.sum()) > 4096
    assert int((row != expected).sum()) <= 1


def test_what_other_rows_ask_for_does_not_narrow_a_row() -> None:
    """Peaked rows: the first 256 scores settle the second row's top-p, but not the others' top_p 1 and top_k 300."""
    logits = torch.linspace(0, 1, 1000).repeat(3, 1)
    logits[:, 7] = 40.0
    draw = {"temperature": 1.0, "seed": 0}
    left = allowed(logits, [req(0, 1, **draw), req(1, 1, top_p=0.5, **draw), req(2, 1, top_k=300, **draw)])
    assert left.sum(dim=1).tolist() == [1000, 1, 300]


def test_temperature_close_to_zero_is_argmax() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(2)) * 50
    for temperature in (1e-300, 1e-30, 1e-7):
        assert sample(logits, [req(0, 1, temperature=temperature, seed=1)]) == [int(logits.argmax())]


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 positions of one seed; 7 degrees of freedom: 24.3 is exceeded once in a thousand."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -torch.inf, 0.5, 0.2, -2.0])
    draws = 20_000
    sampler = Sampler(len(logits), CPU)
    positions = torch.arange(draws)
    args = BatchSamplingArgs(
        temperatures=torch.full((draws,), 0.7), seeds=torch.full((draws,), 1234), positions=positions
    )
    tokens = sampler.sample(logits.expand(draws, -1), args)
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    expected = (logits.double() / 0.7).softmax(dim=0) * draws
    assert counts[5] == 0, "a token of probability 0 was drawn"
    possible = expected > 0
    assert float(((counts - expected)[possible] ** 2 / expected[possible]).sum()) < 24.3


def rows_that_draw(**more: Any) -> list[Req]:
    rows = [{"temperature": 0.7, "seed": 3}, {}, {"temperature": 1.0, "seed": 0, **more}]
    return [
        Req(uid, torch.arange(4 + uid, dtype=torch.int32), SamplingParams(max_tokens=50, **row), uid)
        for uid, row in enumerate(rows)
    ]


def same(a: BatchSamplingArgs | None, b: BatchSamplingArgs | None) -> bool:
    """Of every field, tensors by value."""
    if a is None or b is None:
        return a is b
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, RowsApart) and isinstance(y, RowsApart):
            if not torch.equal(x.rows, y.rows) or not same(x.args, y.args):
                return False
        elif not (torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y):
            return False
    return True


@pytest.mark.parametrize("filtered", [False, True])
def test_the_same_rows_a_token_further_take_no_copy(monkeypatch: pytest.MonkeyPatch, filtered: bool) -> None:
    more = {"top_p": 0.9} if filtered else {}
    sampler, reqs = Sampler(50, CPU), rows_that_draw(**more)
    copies: list[int] = []
    made = Sampler._tensor
    monkeypatch.setattr(Sampler, "_tensor", lambda self, values, dtype: copies.append(1) or made(self, values, dtype))
    for step in range(5):
        args = sampler.prepare(reqs)
        if not filtered:
            assert len(copies) == (4 if step == 0 else 0)
        assert same(args, Sampler(50, CPU).prepare(reqs))
        copies.clear()
        for req in reqs:
            req.complete_one()


def test_what_changes_a_batch_makes_its_arguments_anew() -> None:
    a, b, c = (
        Req(uid, torch.arange(5, dtype=torch.int32), SamplingParams(**row), uid)  # type: ignore[arg-type]
        for uid, row in enumerate([{"temperature": 0.7, "seed": 3}, {"temperature": 1.0, "seed": 0}, {}])
    )
    sampler = Sampler(50, CPU)
    steps = [[a, b], [a, b], [a, c], [b, a], [a, b, c], [b], [a], [a, a]]
    for number, step in enumerate([*steps, *steps[::-1]]):
        for _ in range(2):  # the second time with the lengths of the first
            assert same(sampler.prepare(step), Sampler(50, CPU).prepare(step)), number
        for req in (a, b, c):
            req.complete_one()
