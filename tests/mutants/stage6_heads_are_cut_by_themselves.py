"""6.1: cuts the q heads over the ranks, not the groups."""

from __future__ import annotations

from minisgl.layers.shard import RankHeads, shard_range

kills = "tests/exercises/test_stage6.py::test_three_kv_heads_on_two_ranks"
words = "groups stay whole"


class MyRankHeads(RankHeads):
    def kv(self) -> range:
        return shard_range(self.heads.num_kv_heads, self.rank, self.size)

    def q(self) -> range:
        return shard_range(self.heads.num_heads, self.rank, self.size)
