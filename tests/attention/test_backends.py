"""Every backend against a per-token float32 oracle, over random tiny shapes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minisgl.attention import create_attention
from minisgl.attention.contiguous import ContiguousAttention
from minisgl.attention.paged_torch import PagedTorchAttention, group_by_length
from minisgl.attention.recompute import RecomputeAttention
from minisgl.attention.reference import reference_attention, reference_paged_attention
from minisgl.core.batch import Batch
from minisgl.core.context import Context
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
heads = st.tuples(st.integers(1, 4), st.integers(1, 4), st.sampled_from([2, 8, 16]))  # kv heads, group, head_dim


class Pool:
    """Starts as NaN: attention that reads anything but the tokens of the request shows it."""

    def __init__(self, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int = 1) -> None:
        self.page_size = page_size
        self.kv = torch.full((2, slots, kv_heads, head_dim), torch.nan, dtype=dtype)

    def k_cache(self, layer_id: int) -> Tensor:
        return self.kv[0]

    def v_cache(self, layer_id: int) -> Tensor:
        return self.kv[1]

    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        self.kv[:, out_loc.long()] = torch.stack([k, v])


def qkv(tokens: int, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Views of one projection, as the model's merged qkv gives them: not contiguous."""
    q_heads = kv_heads * group
    merged = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim).to(dtype)
    return merged.split([q_heads, kv_heads, kv_heads], dim=1)


def context(**fields: object) -> Context:
    empty = torch.empty(0, dtype=torch.int32)
    return Context(**{"input_ids": empty, "positions": empty, "logits_rows": None, "attention": None, **fields})


@settings(max_examples=40, deadline=None)
@given(heads, st.integers(1, 20), st.sampled_from(list(TOLERANCE)), st.integers(0, 2**31))
def test_recompute(shape: tuple[int, int, int], tokens: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = qkv(tokens, *shape, dtype)
    out = RecomputeAttention().forward(q, k, v, 0, context())
    assert out.shape == q.shape
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), reference_attention(q, k, v), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(max_examples=40, deadline=None)
@given(heads, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(list(TOLERANCE)), st.integers(0, 99))
def test_contiguous_in_any_number_of_steps(
    shape: tuple[int, int, int], steps: list[int], dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    q, k, v = qkv(sum(steps), *shape, dtype)
    attention, cache = ContiguousAttention(), Pool(sum(steps) + 5, shape[0], shape[2], dtype)
    outs, start = [], 0
    for step in steps:
        new = slice(start, start + step)
        positions = torch.arange(start, start + step)
        ctx = context(positions=positions, kv_cache=cache, out_loc=positions.int())
        outs.append(attention.forward(q[new], k[new], v[new], 0, ctx))
        start += step
    expected = reference_attention(q, k, v)
    torch.testing.assert_close(torch.cat(outs).float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_mask_is_causal_from_the_end() -> None:
    mask = ContiguousAttention().causal_mask(2, 5, torch.device("cpu"))
    assert mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], "query i of n is token m - n + i of m"


@dataclass
class Scene:
    """Requests with their pages, in a pool where the rest is NaN and a table where the rest is out of bounds."""

    batch: Batch
    table: Tensor
    pool: Pool
    lengths: list[tuple[int, int]]

    @classmethod
    def build(
        cls, lengths: list[tuple[int, int]], num_decode: int, page_size: int, dtype: torch.dtype,
        shape: tuple[int, int, int], dummies: int = 0,
    ) -> Scene:  # fmt: skip
        counts = [-(-device_len // page_size) for _, device_len in lengths]
        num_pages = sum(counts) + 2
        pages = torch.randperm(num_pages)
        kv_heads, _, head_dim = shape
        pool = Pool((num_pages + 1) * page_size, kv_heads, head_dim, dtype, page_size)
        width = (max(counts) + 1) * page_size
        dummy_row, dummy_slot = len(lengths), num_pages * page_size
        table = torch.full((dummy_row + 1, width), 10**6, dtype=torch.int32)
        table[dummy_row] = dummy_slot
        params, reqs = SamplingParams(max_tokens=8), []
        table_rows = torch.randperm(len(lengths)).tolist()
        for (cached, device), count, row in zip(lengths, counts, table_rows, strict=True):
            own, pages = pages[:count], pages[count:]
            slots = (own[:, None] * page_size + torch.arange(page_size)).flatten()
            table[row, : len(slots)] = slots
            pool.kv[:, slots[:cached]] = torch.randn(2, cached, kv_heads, head_dim).to(dtype)
            reqs.append(Req(row, torch.zeros(device, dtype=torch.int32), params, row, cached_len=cached))
        batch = Batch(reqs, num_decode=num_decode)
        dummy = Req(-1, torch.zeros(1, dtype=torch.int32), params, dummy_row)
        batch.padded_reqs = reqs + [dummy] * dummies
        return cls(batch, table, pool, lengths + [(0, 1)] * dummies)

    def check(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        kv_heads, group, head_dim = shape
        reqs = self.batch.padded_reqs
        attention = PagedTorchAttention(kv_heads * group, kv_heads, head_dim, self.pool.page_size)
        out_loc = torch.cat([self.table[req.table_idx, req.cached_len : req.device_len] for req in reqs])
        metadata = attention.prepare_metadata(self.batch, self.table)
        table = self.table.clone()
        self.table.fill_(-1)  # what the next step does to it must not be seen by this one
        for layer_id in range(2):  # the second finds a workspace that was used
            q, k, v = qkv(self.batch.num_tokens, *shape, dtype)
            ctx = context(kv_cache=self.pool, out_loc=out_loc, attn_metadata=metadata)
            out = attention.forward(q, k, v, layer_id, ctx)
            assert out.shape == q.shape
            rows = [req.table_idx for req in reqs]
            k_cache, v_cache = self.pool.kv
            expected = reference_paged_attention(q, k_cache, v_cache, table, rows, self.lengths)
            real = sum(req.extend_len for req in self.batch.reqs)  # dummies share a slot: the last of them is read
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(out[:real].float(), expected[:real], atol=tolerance, rtol=tolerance)
            assert torch.isfinite(out).all()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_paged(data: st.DataObject) -> None:
    shape, dtype = data.draw(heads), data.draw(st.sampled_from(list(TOLERANCE)))
    page_size = data.draw(st.sampled_from([1, 4, 16, 64]))
    decode = data.draw(st.lists(st.integers(1, 40), max_size=4), label="device_len of decode rows")
    extend = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=3), label="cached pages, new")
    if not decode and not extend:
        decode = [1]
    dummies = data.draw(st.integers(0, 3)) if not extend or not decode else 0
    torch.manual_seed(data.draw(st.integers(0, 99)))
    lengths = [(n - 1, n) for n in decode] + [(p * page_size, p * page_size + new) for p, new in extend]
    scene = Scene.build(lengths, len(decode), page_size, dtype, shape, dummies)
    scene.check(shape, dtype)


@pytest.mark.parametrize("cached", [3, 15, 16, 17])
def test_paged_chunk_that_starts_inside_a_page(cached: int) -> None:
    torch.manual_seed(0)
    shape = (2, 3, 8)
    Scene.build([(cached, cached + 5), (cached, cached + 1)], 0, 16, torch.float32, shape).check(shape, torch.float32)


def test_rows_of_very_different_lengths() -> None:
    """One long row must not make every other row read as much: they are computed in two calls, of mixed-up rows."""
    torch.manual_seed(0)
    lengths = [(n - 1, n) for n in (5, 2900, 33, 1, 40, 2500)]
    assert group_by_length([n for _, n in lengths], 16) == [[0, 2, 3, 4], [1, 5]]
    Scene.build(lengths, 6, 16, torch.float32, (2, 3, 8)).check((2, 3, 8), torch.float32)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.sampled_from([1, 16, 64]))
def test_grouping_bounds_what_is_padded(lengths: list[int], page_size: int) -> None:
    groups = group_by_length(lengths, page_size)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        own = [-(-lengths[row] // page_size) * page_size for row in group]
        assert max(own) * len(own) - sum(own) <= max(2048, sum(own))


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_short_row_beside_a_longer_one(page_size: int) -> None:
    """The short row is padded with its own only page, most of which another request may have left NaN in."""
    torch.manual_seed(0)
    Scene.build([(0, 1), (20, 21)], 2, page_size, torch.float32, (2, 3, 8)).check((2, 3, 8), torch.float32)


def test_gather_keeps_the_order_of_the_pages() -> None:
    attention, cache = PagedTorchAttention(2, 1, 4, 2), torch.randn(12, 1, 4)
    torch.testing.assert_close(attention.gather(cache, torch.tensor([3, 1])), cache[[6, 7, 2, 3]])


def test_unknown_backend_is_refused_by_name() -> None:
    assert isinstance(create_attention("auto", 2, 1, 4, 16), PagedTorchAttention)
    with pytest.raises(ValueError, match="auto, torch, triton, fi, fa, trtllm, or two .*, not 'flash'"):
        create_attention("flash", 2, 1, 4, 16)


def test_what_cannot_run_says_so_and_what_would() -> None:
    with pytest.raises(ValueError, match="--attn fi,triton: fi needs a CUDA GPU; --attn auto takes what runs here"):
        create_attention("fi,triton", 2, 1, 16, 16)


def test_paged_without_its_metadata_is_refused() -> None:
    q, k, v = qkv(1, 1, 2, 4, torch.float32)
    with pytest.raises(ValueError, match="attn_metadata"):
        PagedTorchAttention(2, 1, 4, 16).forward(q, k, v, 0, context())
