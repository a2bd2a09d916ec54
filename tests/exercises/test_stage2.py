"""Stage 2's exercises, each claim in words: appending, attending to what is cached, positions, bytes.

They hold for the package's own code; `minisgl check 2` runs them on a learner's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import make_tiny_model
from torch import Tensor
from wrong import equal

from minisgl.attention.contiguous import ContiguousAttention
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage2.contiguous_cache import ContiguousCache
from minisgl.stage2.llm import LLM

SHAPE: Any = SimpleNamespace(num_layers=3, num_kv_heads=2, head_dim=4, num_q_heads=6)  # of a ModelConfig


def cache() -> ContiguousCache:
    return ContiguousCache(SHAPE, 8, torch.float32, torch.device("cpu"))


def numbers(tokens: int, first: int = 1) -> Tensor:
    """Token i is all first + i: [tokens, 2, 4]."""
    return (torch.arange(tokens) + float(first))[:, None, None].expand(tokens, 2, 4).clone()


def test_each_token_goes_to_its_slot() -> None:
    made = cache()
    made.store(1, numbers(3), numbers(3, 11), torch.tensor([0, 1, 2], dtype=torch.int32))
    made.store(1, numbers(1, 4), numbers(1, 14), torch.tensor([3], dtype=torch.int32))
    k, v = made.k_cache(1)[:, 0, 0], made.v_cache(1)[:, 0, 0]
    assert k.any(), "the K cache is still zero after store"
    equal(k, [1, 2, 3, 4, 0, 0, 0, 0], "three tokens went to the slots 0 to 2, then one to slot 3: the K cache")
    equal(v, [11, 12, 13, 14, 0, 0, 0, 0], "the V holds what v was: 11 to 14 in the slots 0 to 3")


def test_nothing_else_is_written() -> None:
    made = cache()
    made.store(1, numbers(1), numbers(1), torch.tensor([5], dtype=torch.int32))
    for layer in (0, 2):
        assert not made.k_cache(layer).any(), f"layer {layer} was written to, and layer 1 was meant: not another layer"
        assert not made.v_cache(layer).any(), f"layer {layer} was written to, and layer 1 was meant: not another layer"
    assert int(made.k_cache(1).flatten(1).any(1).sum()) == 1, "one token was stored, and more than one slot changed"


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = ContiguousAttention().attend(q, k, v)
    assert out.shape == q.shape, f"q is {list(q.shape)}, and so is what comes back, not {list(out.shape)}"
    return out


def test_one_new_token_sees_all_that_is_cached() -> None:
    k, v = torch.zeros(5, 2, 4), numbers(5)
    out = attend(torch.randn(1, 6, 4), k, v)
    equal(
        out,
        torch.full((1, 6, 4), 3.0),
        "one query, five keys of equal score: it sees all that is cached, the mean of 1 to 5",
    )


def test_new_tokens_do_not_see_each_others_future() -> None:
    out = attend(torch.randn(2, 6, 4), torch.zeros(5, 2, 4), numbers(5))
    words = "2 queries and 5 keys of equal score: the first is token 3, and sees 1 to 4, not the future; the second all"
    equal(out[:, 0, 0], [2.5, 3.0], words)


def test_in_steps_as_at_once() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 6, 4), torch.randn(7, 2, 4), torch.randn(7, 2, 4)
    whole = attend(q, k, v)
    parts = [attend(q[a:b], k[:b], v[:b]) for a, b in ((0, 4), (4, 6), (6, 7))]
    equal(torch.cat(parts), whole, "seven tokens in steps of 4, 2 and 1 give what one step gives")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32") as made:
        yield made


def req(prompt: list[int], generated: list[int]) -> Req:
    """A request some steps on: all but the last generated token is cached."""
    made = Req(0, torch.tensor(prompt, dtype=torch.int32), SamplingParams(max_tokens=9), 0)
    for token in generated:
        made.complete_one()
        made.append_host(token, frozenset())
    return made


def test_prefill_computes_the_prompt(llm: LLM) -> None:
    ctx = llm._context(req([7, 8, 9], []))
    equal(ctx.input_ids, [7, 8, 9], "nothing is cached yet: the step's ids are the whole prompt")
    equal(ctx.positions, [0, 1, 2], "the positions of a prompt begin at 0")
    equal(ctx.logits_rows, [2], "logits_rows: of 3 tokens the last, row 2, is wanted")


def test_a_decode_step_computes_one_token_at_its_position(llm: LLM) -> None:
    ctx = llm._context(req([7, 8, 9], [10, 11]))
    equal(ctx.input_ids, [11], "4 tokens are cached: the step's ids are the fifth alone")
    equal(ctx.positions, [4], "4 tokens are cached: the positions of the step are [4]")
    equal(ctx.logits_rows, [0], "logits_rows counts in this step, which has one row: 0")


def test_the_cache_is_written_where_the_tokens_are(llm: LLM) -> None:
    ctx = llm._context(req([7, 8, 9], [10]))
    equal(ctx.out_loc, [3], "token 3 is new, and slot 3 is its place: out_loc")
    assert ctx.out_loc.dtype == torch.int32, f"out_loc is int32, not {ctx.out_loc.dtype}"
    assert ctx.kv_cache is llm.cache, "kv_cache has to be this LLM's own cache"
    assert ctx.attention is llm.attention, "attention has to be this LLM's own"


def test_tokens_are_those_of_stage_1(llm: LLM, folder: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (cached,) = llm.generate([[5, 6, 7]], params)
    with importlib.import_module("minisgl.stage1.llm").LLM(str(folder), dtype="float32") as naive:
        (plain,) = naive.generate([[5, 6, 7]], params)
    assert cached.token_ids == plain.token_ids, f"a cache changes no token: {cached.token_ids} and {plain.token_ids}"


def test_bytes_of_a_model_of_known_size() -> None:
    found = ContiguousCache.bytes_per_token(SHAPE, torch.bfloat16)
    words = "3 layers, 2 KV heads (of 6 query heads), head_dim 4, 2 bytes a number: 96 bytes"
    hint = {48: ", twice: K and V", 288: ". The query heads are not cached", 192: ". bfloat16 has 2 bytes, not 4"}.get(
        found, ""
    )
    assert found == 96, f"{words}, not {found}{hint}"


def test_bytes_are_what_the_cache_takes() -> None:
    made = cache()
    taken = sum(made.k_cache(i).nbytes + made.v_cache(i).nbytes for i in range(3))
    found = ContiguousCache.bytes_per_token(SHAPE, torch.float32)
    assert found * 8 == taken, f"a cache of 8 tokens takes {taken} bytes; 8 times {found} is {8 * found}"
