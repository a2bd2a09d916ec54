"""Shards cover everything once, differ by at most one unit, and keep q heads with their KV heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.layers.shard import RankHeads, shard_range, shard_sizes


def ranges(num_heads: int, num_kv_heads: int, size: int) -> tuple[list[range], list[range]]:
    heads = SimpleNamespace(num_heads=num_heads, num_kv_heads=num_kv_heads)
    ranks = [RankHeads(heads, rank, size) for rank in range(size)]
    return [own.q() for own in ranks], [own.kv() for own in ranks]


@given(st.integers(1, 16), st.integers(0, 200))
def test_shards_cover_all_once_and_the_first_are_larger(size: int, more: int) -> None:
    total = size + more
    shards = [shard_range(total, rank, size) for rank in range(size)]
    assert [unit for shard in shards for unit in shard] == list(range(total))
    assert [len(shard) for shard in shards] == [total // size + (rank < total % size) for rank in range(size)]
    assert shard_sizes(total, size) == [len(shard) for shard in shards]


def test_a_rank_with_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="2 units cannot be cut over 3 ranks: use --tp 2"):
        shard_range(2, 0, 3)


def test_the_built_in_model_on_two_ranks() -> None:
    assert ranges(9, 3, 2) == ([range(6), range(6, 9)], [range(2), range(2, 3)])


def test_more_ranks_than_kv_heads_replicate_them() -> None:
    q, kv = ranges(8, 2, 4)
    assert kv == [range(1), range(1), range(1, 2), range(1, 2)]
    assert q == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert ranges(6, 2, 4)[0] == [range(2), range(2, 3), range(3, 5), range(5, 6)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(9, 3, 4), (32, 8, 12), (4, 4, 8)])
def test_what_does_not_come_out_even_is_refused(num_heads: int, num_kv_heads: int, size: int) -> None:
    with pytest.raises(ValueError, match="--tp"):
        ranges(num_heads, num_kv_heads, size)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_heads(group: int, num_kv_heads: int, ranks: int, replicate: bool) -> None:
    size = num_kv_heads * min(ranks, group) if replicate else min(ranks, num_kv_heads)
    q, kv = ranges(group * num_kv_heads, num_kv_heads, size)
    assert [head for shard in q for head in shard] == list(range(group * num_kv_heads))
    held = [head for shard in kv for head in shard]
    assert len({held.count(head) for head in range(num_kv_heads)}) == 1, "each KV head is on equally many ranks"
    for q_shard, kv_shard in zip(q, kv, strict=True):
        assert {head // group for head in q_shard} == set(kv_shard), "a q head without its KV head, or the reverse"
        assert len(q_shard) % len(kv_shard) == 0, "a rank's groups must be of one size"
