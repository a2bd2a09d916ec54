"""6.1: where a KV head is copied, each of its ranks computes all of its q heads: they are in the sum twice."""

from __future__ import annotations

from minisgl.layers.shard import RankHeads, shard_range

kills = "tests/exercises/test_stage6.py::test_more_ranks_than_kv_heads_hold_copies"
words = "on one rank only"


class MyRankHeads(RankHeads):
    def kv(self) -> range:
        kv_heads = self.heads.num_kv_heads
        if self.size <= kv_heads:
            return shard_range(kv_heads, self.rank, self.size)
        if self.size % kv_heads:
            raise ValueError("not even")
        first = self.rank * kv_heads // self.size
        return range(first, first + 1)

    def q(self) -> range:
        kv = self.kv()
        group = self.heads.num_heads // self.heads.num_kv_heads
        return range(kv.start * group, kv.stop * group)
