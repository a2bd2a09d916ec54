"""Stage 6, tensor parallel: the package's own methods. Knows no other way.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from minisgl.layers.embedding import VocabParallelEmbedding
from minisgl.layers.linear import LinearRowParallel
from minisgl.layers.shard import RankHeads, shard_range
from minisgl.models.weights import SHARDING, Piece, ReadingPlan
from minisgl.stage6.communicators import DistributedCommunicator
from minisgl.stage6.inbox import LockStepInbox
from minisgl.stage6.messages import Order, Stop


class MyRankHeads(RankHeads):
    # 6.1 the heads of a rank
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

    def q(self) -> range:
        """The q heads: all those of its KV heads, or its share of them where the KV head is replicated."""
        kv = self.kv()
        group = self.heads.num_heads // self.heads.num_kv_heads
        if self.size <= self.heads.num_kv_heads:
            return range(kv.start * group, kv.stop * group)
        copies = self.size // self.heads.num_kv_heads
        share = shard_range(group, self.rank % copies, copies)
        return range(kv.start * group + share.start, kv.start * group + share.stop)


class MyPiece(Piece):
    # 6.2 what a rank reads
    def read(self, checkpoint: Any) -> Tensor:
        """checkpoint: this piece's tensor there, of two dimensions or one. It reads from the file only what is asked
        of it by an index."""
        start, stop = self.source.start, self.source.stop
        return checkpoint[start:stop] if self.dim == 0 else checkpoint[:, start:stop]


class MyReadingPlan(ReadingPlan):
    # 6.2 what a rank reads
    def parts(
        self, parameter: str, prefix: str, module: str, kind: str, expert: int | None = None
    ) -> Iterator[tuple[str, Piece]]:
        """The parts of SHARDING[module], this rank's slice of each, one after another in the parameter. A part's name
        in the checkpoint is prefix, part, ".", kind ("weight" or "bias")."""
        dim, parts = SHARDING[module]
        offset = 0
        for part, units in parts:
            source, total = self.cut(units, expert is not None)
            yield f"{prefix}{part}.{kind}", Piece(parameter, expert, dim, source, total, offset)
            offset += len(source)


class MyLinearRowParallel(LinearRowParallel):
    # 6.3 add up what is cut by rows
    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, local_inputs]. Returns [tokens, outputs], the same on every rank."""
        bias = self.bias if self.comm.rank == 0 else None  # in the sum once
        return self.comm.all_reduce(self.product(x, bias))


class MyVocabParallelEmbedding(VocabParallelEmbedding):
    # 6.4 embed a vocabulary that is cut
    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: int32 [tokens]. Returns [tokens, hidden]. Each id is on one rank; the others add zeros."""
        if self.comm.size == 1:
            return F.embedding(input_ids, self.weight)  # [tokens, hidden]
        local = input_ids - self.vocab_range.start  # [tokens]
        elsewhere = (local < 0) | (local >= len(self.vocab_range))  # [tokens]
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)  # [tokens, hidden]
        return self.comm.all_reduce(x.masked_fill_(elsewhere[:, None], 0))


class MyDistributedCommunicator(DistributedCommunicator):
    # 6.5 gather the logits
    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """x: [rows, sizes[rank]] on each rank. Returns [rows, sum(sizes)], the same on all.

        The collective wants equal shapes, so each shard is padded to the widest.
        """
        widest = max(sizes)
        shard = F.pad(x, (0, widest - x.shape[1])).contiguous()  # [rows, widest]
        shards = list(x.new_empty(self.size, len(x), widest).unbind())
        self._collective(dist.all_gather, shards, shard, group=self._data)
        return torch.cat([shard[:, :size] for shard, size in zip(shards, sizes, strict=True)], dim=1)


class MyLockStepInbox(LockStepInbox):
    # 6.6 ranks in lock step
    def receive(self, blocking: bool) -> list[Order] | None:
        """As many messages as rank 0 has, the same on all ranks. blocking: wait for the first, before they agree on a
        number. None: one of them is Stop."""
        if blocking:
            if not self._mailbox:
                self._on_idle()
            self._mailbox.wait()  # each rank at its own mailbox: no collective may wait for hours
        count = self._broadcast(len(self._mailbox))
        orders = [self._decode(message) for message in self._mailbox.take(count)]
        return None if any(isinstance(order, Stop) for order in orders) else orders
