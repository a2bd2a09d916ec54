"""6.1: copies of KV heads go round the ranks (0, 1, 0, 1), where they should be neighbours."""

from __future__ import annotations

from minisgl.layers.shard import RankHeads, shard_range

kills = "tests/exercises/test_stage6.py::test_more_ranks_than_kv_heads_hold_copies"
words = "held twice, by neighbours"


class MyRankHeads(RankHeads):
    def kv(self) -> range:
        kv_heads = self.heads.num_kv_heads
        if self.size <= kv_heads:
            return shard_range(kv_heads, self.rank, self.size)
        return range(self.rank % kv_heads, self.rank % kv_heads + 1)

    def q(self) -> range:
        kv = self.kv()
        group = self.heads.num_heads // self.heads.num_kv_heads
        if self.size <= self.heads.num_kv_heads:
            return range(kv.start * group, kv.stop * group)
        copies = self.size // self.heads.num_kv_heads
        share = shard_range(group, self.rank % copies, copies)
        return range(kv.start * group + share.start, kv.start * group + share.stop)
