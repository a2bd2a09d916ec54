"""Penalties, biases and ends that come too early: against transformers' processors and a reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penalty_reference import penalized
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from minisgl.core.prompts import check_prompt
from minisgl.core.req import ChunkedReq, Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.sampling.filters import TokenFilters
from minisgl.sampling.penalties import LogitAdjustments
from minisgl.sampling.sampler import Sampler

CPU = torch.device("cpu")
VOCAB = 40
EOS = frozenset({3, 5})


def req(prompt: list[int], answer: list[int], row: int = 0, **params: Any) -> Req:
    ids = torch.tensor(prompt + answer, dtype=torch.int32)
    return Req(row, ids, SamplingParams(**params), table_idx=row, prompt_len=len(prompt))


def adjusted(logits: Tensor, reqs: list[Req], token_pool: Tensor | None = None) -> Tensor:
    apart = Sampler(logits.shape[1], CPU).prepare(reqs, EOS, token_pool).apart
    before, found = logits.clone(), logits.float()
    if apart is not None and apart.adjust is not None:
        found = found.clone()
        found[apart.rows] = apart.adjust.apply(logits if len(apart.rows) == len(logits) else logits[apart.rows])
    assert torch.equal(logits, before), "the caller's logits were changed"
    return found


def expected(logits: Tensor, request: Req) -> Tensor:
    return penalized(logits, request.sampling_params, request.input_ids.tolist(), request.prompt_len, EOS)


params = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 3),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
    },
)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=9)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(ids.filter(bool), ids, params), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
    st.booleans(),
)
def test_each_row_is_the_references(
    rows: list[tuple[list[int], list[int], dict[str, Any]]], dtype: torch.dtype, seed: int, pooled: bool
) -> None:
    """Rows in the token pool lie in another order, among rows of others, and end in what was there before."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(len(rows), VOCAB, generator=generator)).to(dtype)
    reqs = [req(prompt, answer, 7 - row, **asked) for row, (prompt, answer, asked) in enumerate(rows)]
    pool = torch.randint(VOCAB, (9, 24), generator=generator, dtype=torch.int32)
    for request in reqs:
        pool[request.table_idx, : request.device_len] = request.input_ids
    found = adjusted(logits, reqs, pool if pooled else None)
    for row, request in enumerate(reqs):
        torch.testing.assert_close(found[row].double(), expected(logits[row], request), rtol=1e-5, atol=1e-4)


def test_repetition_is_transformers() -> None:
    logits = 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    request = req([1, 2, 3, 4], [5, 6, 2], repetition_penalty=1.7)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(request.input_ids[None].long(), logits.clone())
    torch.testing.assert_close(adjusted(logits, [request]), expected)


@pytest.mark.parametrize("output_len", [0, 2, 3, 4])
def test_min_tokens_is_transformers(output_len: int) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    request = req([1, 2], [9] * output_len, min_tokens=3)
    processor = MinNewTokensLengthLogitsProcessor(2, 3, sorted(EOS), device="cpu")
    assert torch.equal(adjusted(logits, [request]), processor(request.input_ids[None].long(), logits.clone()))


def test_an_end_that_the_model_does_not_have_changes_nothing() -> None:
    """Tokenizers and generation_config.json may name tokens for which there is no row of the embedding."""
    logits = torch.randn(2, VOCAB)
    reqs = [req([1, 2], [4], row, min_tokens=2) for row in range(2)]
    apart = Sampler(VOCAB, CPU).prepare(reqs, EOS | {VOCAB, VOCAB + 700}).apart
    assert apart is not None
    assert apart.adjust is not None
    assert torch.equal(apart.adjust.apply(logits), adjusted(logits, reqs))


def test_logit_bias_is_transformers() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    bias = {4: 7.5, 39: -100.0}
    expected = SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()})(torch.tensor([[1]]), logits.clone())
    torch.testing.assert_close(adjusted(logits, [req([1], [], logit_bias=bias)]), expected)


def test_a_greedy_row_takes_the_highest_after_penalties() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 8], logits[:, 9] = 5.0, 4.0
    sampler = Sampler(VOCAB, CPU)
    reqs = [req([1], [8], 0, frequency_penalty=1.5), req([1], [8], 1), req([8], [], 2, repetition_penalty=2.0)]
    assert sampler.sample(logits, sampler.prepare(reqs)).tolist() == [9, 8, 9]


def test_a_forbidden_token_is_not_drawn() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[:, 3] = 50.0
    sampler = Sampler(VOCAB, CPU)
    for seed in range(20):
        early = req([1], [2], temperature=1.0, seed=seed, min_tokens=2)
        assert int(sampler.sample(logits, sampler.prepare([early], EOS))) not in EOS
        late = req([1], [2, 2], temperature=1.0, seed=seed, min_tokens=2)
        assert int(sampler.sample(logits, sampler.prepare([late], EOS))) == 3


@settings(max_examples=40)
@given(st.lists(st.tuples(ids.filter(bool), ids, params, st.floats(0, 2)), min_size=2, max_size=4), st.integers(0, 99))
def test_an_answer_does_not_depend_on_the_batch(rows: list[tuple[Any, ...]], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)).bfloat16()
    reqs = [req(p, a, i, temperature=t, seed=i, top_p=0.9, **asked) for i, (p, a, asked, t) in enumerate(rows)]
    sampler = Sampler(VOCAB, CPU)
    together = sampler.sample(logits, sampler.prepare(reqs, EOS)).tolist()
    alone = [int(sampler.sample(logits[[i]], sampler.prepare([each], EOS))) for i, each in enumerate(reqs)]
    assert together == alone


def test_other_rows_do_not_pay_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed and filtered, in float32, are the rows that ask for it; the others' tokens are theirs."""
    seen: list[tuple[str, int]] = []
    change, rank = LogitAdjustments.apply, TokenFilters._rank
    monkeypatch.setattr(LogitAdjustments, "apply", lambda self, x: seen.append(("changed", len(x))) or change(self, x))
    monkeypatch.setattr(
        TokenFilters, "_rank", lambda self, x, args: seen.append(("ranked", len(x))) or rank(self, x, args)
    )
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(5)).bfloat16()
    best = logits.argmax(dim=1).tolist()
    bias = {(best[1] + 1) % VOCAB: 50.0}
    draw = {"temperature": 1.0, "seed": 1}
    asked: list[dict[str, Any]] = [{}, {"logit_bias": bias}, {}, {**draw, "top_p": 1e-6}, draw, {"min_tokens": 1}]
    sampler = Sampler(VOCAB, CPU)
    tokens = sampler.sample(logits, sampler.prepare([req([1], [], i, **p) for i, p in enumerate(asked)], EOS)).tolist()
    assert seen == [("changed", 3), ("ranked", 3)], "rows 1, 3 and 5"
    assert tokens[:4] == [best[0], *bias, best[2], best[3]]
    assert tokens[5] not in EOS


def test_rows_in_several_groups() -> None:
    """Every other row is penalized, and more of them than are counted at once."""
    logits = torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(4))
    reqs = [req([i % 7], [i % 5, 4], i, presence_penalty=1.0 if i % 2 else 0.0) for i in range(300)]
    found = adjusted(logits, reqs)
    for row, request in enumerate(reqs):
        torch.testing.assert_close(found[row].double(), expected(logits[row], request), rtol=1e-5, atol=1e-4)


def test_lengths_are_those_of_the_step() -> None:
    """They advance before the step runs; and a token that only the device knows is counted."""
    request, sampler = req([1], [8], frequency_penalty=2.0), Sampler(VOCAB, CPU)
    pool = torch.tensor([[1, 8, 9, 9, 9]], dtype=torch.int32)
    request.complete_one()
    args = sampler.prepare([request], EOS, pool)  # the token at 2 is not known to the host
    request.complete_one()
    assert args.apart is not None
    assert args.apart.adjust is not None
    found = args.apart.adjust.apply(torch.zeros(1, VOCAB))[0]
    assert found[[1, 8, 9]].tolist() == [0, -2, -2], "8 and 9 once each, the prompt not at all"


def test_who_asks_for_nothing_pays_nothing() -> None:
    sampler = Sampler(VOCAB, CPU)
    asks_in_vain = {"stop_token_ids": (4,), "logit_bias": {}, "repetition_penalty": 1.0}
    chunk = ChunkedReq(0, torch.zeros(8, dtype=torch.int32), SamplingParams(presence_penalty=1.0), 0, chunk_end=4)
    for reqs in ([req([1], [2], **asks_in_vain)], [req([1], [2, 2], min_tokens=2)], [chunk]):
        assert sampler.prepare(reqs, EOS).apart is None


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_token_ids_end_an_answer(ignore_eos: bool) -> None:
    request = req([1], [], stop_token_ids=(7,), ignore_eos=ignore_eos)
    assert request.append_host(3, EOS) == (None if ignore_eos else "stop")
    assert request.append_host(7, EOS) == "stop"


@pytest.mark.parametrize(
    ("field", "value"), [("stop_token_ids", (1, VOCAB)), ("logit_bias", {2: 1.0, VOCAB + 3: -1.0})]
)
def test_ids_that_the_model_does_not_have(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} has token id \d+, over this model's last, {VOCAB - 1}"):
        check_prompt([1], SamplingParams(**{field: value}), VOCAB, 2048)
