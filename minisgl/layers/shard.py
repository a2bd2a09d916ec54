"""Which part of a dimension a rank holds. The one answer for layers, weight loader, KV pool and tests; no tensors.

Attention is cut between KV groups (a KV head and the q heads that attend to it): a q head and its K and V must
be on the same rank. Heads need not divide: 9 q heads and 3 KV heads on 2 ranks are 6 + 2 and 3 + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from minisgl.learn import exercise


class Heads(Protocol):
    """What is asked of a ModelConfig here."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...


def shard_range(total: int, rank: int, size: int) -> range:
    """The contiguous units of `total` that are this rank's; the first `total % size` ranks hold one more.

    Raises ValueError when a rank would hold nothing.
    """
    if total < size:
        raise ValueError(f"{total} units cannot be cut over {size} ranks: use --tp {total} or less")
    each, more = divmod(total, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def shard_sizes(total: int, size: int) -> list[int]:
    """How many units each rank holds."""
    return [len(shard_range(total, rank, size)) for rank in range(size)]


@dataclass(frozen=True)
class RankHeads:
    """The heads of one of `size` ranks."""

    heads: Heads
    rank: int
    size: int

    @exercise("6.1")
    def kv(self) -> range:
        """The KV heads. With more ranks than KV heads each head is held by several ranks, as many for all.

        Raises ValueError when that would not come out even.
        """
        kv_heads = self.heads.num_kv_heads
        if self.size <= kv_heads:
            return shard_range(kv_heads, self.rank, self.size)
        if self.size % kv_heads:
            raise ValueError(
                f"--tp {self.size} does not fit {kv_heads} KV heads: use at most {kv_heads} ranks, "
                f"or a multiple of {kv_heads}"
            )
        first = self.rank * kv_heads // self.size
        return range(first, first + 1)

    @exercise("6.1")
    def q(self) -> range:
        """The q heads: all those of its KV heads, or its share of them where the KV head is replicated."""
        kv = self.kv()
        group = self.heads.num_heads // self.heads.num_kv_heads
        if self.size <= self.heads.num_kv_heads:
            return range(kv.start * group, kv.stop * group)
        copies = self.size // self.heads.num_kv_heads
        share = shard_range(group, self.rank % copies, copies)
        return range(kv.start * group + share.start, kv.start * group + share.stop)
