"""The kernel that finds what filters leave, against `TokenFilters`: compiled on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 (and NumPy below 2.4)", allow_module_level=True)

from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.kernel.triton_filters import lowest_logits
from minisgl.sampling.args import BatchSamplingArgs
from minisgl.sampling.filters import TokenFilters
from minisgl.sampling.sampler import Sampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCAB = 5003  # two blocks of lanes, and not whole ones
LARGE = 151_936
ROUNDING = 1e-5  # of a mass: float32 sums, and how well a GPU computes exp2


def random(rows: int, vocab: int, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows + vocab)
    return (spread * torch.randn(rows, vocab, generator=generator)).to(DEVICE)


def args_of(vocab: int, rows: list[dict[str, Any]]) -> BatchSamplingArgs:
    """By way of requests. A dict without a temperature is a greedy row."""
    params = [SamplingParams(seed=i, **row) for i, row in enumerate(rows)]
    reqs = [Req(i, torch.zeros(i + 1, dtype=torch.int32), p, i) for i, p in enumerate(params)]
    args = Sampler(vocab, DEVICE)._draws(reqs, [p.temperature == 0 for p in params])
    assert args.temperatures is not None
    return args


def check(logits: Tensor, rows: list[dict[str, Any]]) -> Tensor:
    """That what stays is what `TokenFilters` leaves; or, where top-p's border is a matter of rounding, that what is
    above the lowest that stays has less than top_p of the mass, and with it no less. Returns what stays."""
    args = args_of(logits.shape[1], rows)
    floors = lowest_logits(logits, args)
    kept = (logits.float() >= floors[:, None]) & (logits > -torch.inf)
    scores = logits.float() / args.temperatures[:, None]  # type: ignore[index]
    expected = TokenFilters().apply(scores.clone(), args) > -torch.inf
    for i in (kept != expected).any(dim=1).nonzero().flatten().tolist():
        assert rows[i].get("top_p", 1) < 1, f"row {i}, {rows[i]}: {int(kept[i].sum())}, not {int(expected[i].sum())}"
        competing = scores[i].double()
        if "top_k" in rows[i]:
            competing = competing[competing >= competing.topk(rows[i]["top_k"]).values[-1]]
        probs = competing.softmax(0)
        lowest = scores[i][kept[i]].min().double()
        above, held = (float(probs[mask].sum()) for mask in (competing > lowest, competing >= lowest))
        assert above < rows[i]["top_p"] + ROUNDING, f"row {i}, {rows[i]}"
        assert held > rows[i]["top_p"] - ROUNDING, f"row {i}, {rows[i]}"
    return kept


TOP = list(product((1, 2, 50, VOCAB), (1e-6, 0.5, 0.9, 0.999, 1.0)))
EVERY = [
    {"temperature": (0.1, 0.6, 1.0, 5.0)[i % 4], "top_k": k, "top_p": p, "min_p": (0.0, 0.0, 0.02)[i % 3]}
    for i, (k, p) in enumerate(TOP)
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_filter(dtype: torch.dtype) -> None:
    check(random(len(EVERY), VOCAB).to(dtype), EVERY)


@pytest.mark.parametrize("vocab", [1, 3, 700, 4096, 4097])
def test_small_vocabularies(vocab: int) -> None:
    filters = ({"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.5})
    rows = [{"temperature": 0.8, **f} for f in filters] + [{"temperature": t, "top_p": 0.999} for t in (1e-6, 5.0)]
    check(random(len(rows), vocab), rows)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "tied": lambda x: x.round(),
    "constant": lambda x: torch.full_like(x, -3.5),
    "zeros of both signs": lambda x: torch.where(x > 0, 0.0, -0.0),
    "one that has it all": lambda x: x.index_fill(1, torch.tensor([4711], device=x.device), 90.0),
    "peaked": lambda x: x * 30,
    "negative": lambda x: x - 1e4,
    "mostly forbidden": lambda x: x.masked_fill(torch.arange(x.shape[1], device=x.device) % 1000 != 7, -torch.inf),
    "one allowed": lambda x: x.masked_fill(torch.arange(x.shape[1], device=x.device) != 4800, -torch.inf),
    "one lane": lambda x: torch.where(torch.arange(x.shape[1], device=x.device) % 4096 == 5, x + 9, x),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_many_kinds(name: str) -> None:
    filters = (
        {"top_k": 3},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"top_p": 1e-14},
        {"min_p": 0.1},
    )
    rows = [{"temperature": 0.7, **f} for f in filters]
    check(ROWS[name](random(len(rows), VOCAB)), rows)


TEN_IN_A_LANE: list[tuple[dict[str, Any], int]] = [  # filters, and how many stay
    ({"top_k": 10}, 10),
    ({"top_k": 12}, 12),
    ({"top_k": 7, "top_p": 0.9}, 6),
    ({"top_p": 0.6}, 5),
    ({"top_k": 2, "top_p": 0.4}, 10),  # the highest has 0.23 of the ten, and 0.48 of the four that its lane keeps
]


def test_those_that_a_lane_hides_are_found() -> None:
    """A lane keeps four. Here the ten highest are tokens of one lane; in the last row nine of them are equal."""
    logits, lane = random(len(TEN_IN_A_LANE), 11 * 4096, 0.5), 4096 * torch.arange(10, device=DEVICE) + 33
    logits[:, lane] = torch.linspace(20, 21, 10, device=DEVICE)
    logits[-1, lane[:9]] = 20.0
    kept = check(logits, [{"temperature": 1.0, **filters} for filters, _ in TEN_IN_A_LANE])
    assert kept.sum(dim=1).tolist() == [count for _, count in TEN_IN_A_LANE]


def test_a_flat_row_is_searched_as_a_whole() -> None:
    filters = ({"top_p": 0.9}, {"top_k": 20_000, "top_p": 0.5}, {"top_k": 29_500})
    kept = check(random(3, 30_000, 0.3), [{"temperature": 1.0, **f} for f in filters])
    assert (kept.sum(dim=1) > 5000).all()


MIXED = [
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.0},
    {},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.5, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 5},
]


def test_rows_that_ask_for_nothing_keep_all() -> None:
    floors = lowest_logits(random(len(MIXED), VOCAB), args_of(VOCAB, MIXED))
    assert (floors == -torch.inf).tolist() == [not {"top_k", "top_p", "min_p"} & set(row) for row in MIXED]


def test_a_row_depends_on_no_other_and_on_no_dtype() -> None:
    logits = random(len(MIXED), VOCAB).to(torch.bfloat16)
    args = args_of(VOCAB, MIXED)
    together = lowest_logits(logits, args)
    assert lowest_logits(logits.float(), args).tolist() == together.tolist()
    wide = torch.zeros(len(MIXED), VOCAB + 13, dtype=logits.dtype, device=DEVICE)
    wide[:, :VOCAB] = logits
    assert lowest_logits(wide[:, :VOCAB], args).tolist() == together.tolist()
    alone = [
        lowest_logits(logits[i : i + 1], args_of(VOCAB, [row])) for i, row in enumerate(MIXED) if "temperature" in row
    ]
    assert [float(x) for x in alone] == [
        float(x) for x, row in zip(together, MIXED, strict=True) if "temperature" in row
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sampler_draws_the_same_tokens(dtype: torch.dtype) -> None:
    logits = random(len(MIXED), VOCAB).to(dtype)
    plain, fused = Sampler(VOCAB, DEVICE), Sampler(VOCAB, DEVICE)
    fused.fused = True
    for step in range(6):
        params = [SamplingParams(seed=100 * step + i, **row) for i, row in enumerate(MIXED)]
        reqs = [Req(i, torch.zeros(step + 1, dtype=torch.int32), p, i) for i, p in enumerate(params)]
        args = plain.prepare(reqs)
        assert fused.sample(logits, args).tolist() == plain.sample(logits, args).tolist()


def test_a_learners_filters_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.sampling.sampler.triton_runs", lambda device: True)
    assert Sampler(9, DEVICE, fused=True).fused
    monkeypatch.setattr(TokenFilters, "top_p_threshold", lambda self, ranked, log_total, top_p: ranked[:, :1])
    assert not Sampler(9, DEVICE, fused=True).fused


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_a_large_vocabulary(spread: float, dtype: torch.dtype) -> None:
    rows = [{**row, "top_k": LARGE if row["top_k"] == VOCAB else row["top_k"]} for row in EVERY]
    check(random(len(rows), LARGE, spread).to(dtype), rows)


@pytest.mark.gpu
def test_more_rows_than_a_gpu_takes_at_once() -> None:
    """And again, launched behind one another."""
    logits = random(300, LARGE, 3.0).to(torch.bfloat16)
    rows = [MIXED[i % len(MIXED)] for i in range(300)]
    args = args_of(LARGE, rows)
    first = lowest_logits(logits, args)
    check(logits[:60], rows[:60])
    for _ in range(20):
        assert torch.equal(lowest_logits(logits, args), first)
    for start in (0, 60, 294):
        part = args_of(LARGE, rows[start : start + 6])
        assert torch.equal(lowest_logits(logits[start : start + 6], part), first[start : start + 6])
