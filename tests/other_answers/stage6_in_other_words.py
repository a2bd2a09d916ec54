"""Lists for iterators, masks by multiplication, the bias after the product, a gather into tensors of its own."""

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
    def kv(self) -> range:
        n = self.heads.num_kv_heads
        if self.size > n:
            if self.size % n:
                raise ValueError("uneven copies")
            head = self.rank * n // self.size
            return range(head, head + 1)
        return shard_range(n, self.rank, self.size)

    def q(self) -> range:
        group = self.heads.num_heads // self.heads.num_kv_heads
        kv = self.kv()
        if self.size > self.heads.num_kv_heads:
            copies = self.size // self.heads.num_kv_heads
            mine = shard_range(group, self.rank % copies, copies)
            return range(kv.start * group + mine.start, kv.start * group + mine.stop)
        return range(kv.start * group, kv.stop * group)


class MyPiece(Piece):
    def read(self, checkpoint: Any) -> Tensor:
        wanted = slice(self.source.start, self.source.stop)
        return checkpoint[(slice(None), wanted) if self.dim else wanted]


class MyReadingPlan(ReadingPlan):
    def parts(
        self, parameter: str, prefix: str, module: str, kind: str, expert: int | None = None
    ) -> Iterator[tuple[str, Piece]]:
        dim, parts = SHARDING[module]
        found = []
        place = 0
        for part, units in parts:
            source, total = self.cut(units, expert is not None)
            found.append((f"{prefix}{part}.{kind}", Piece(parameter, expert, dim, source, total, place)))
            place += len(source)
        return found


class MyLinearRowParallel(LinearRowParallel):
    def forward(self, x: Tensor) -> Tensor:
        term = self.product(x, None)
        if self.bias is not None and self.comm.rank == 0:
            term = term + self.bias
        return self.comm.all_reduce(term)


class MyVocabParallelEmbedding(VocabParallelEmbedding):
    def forward(self, input_ids: Tensor) -> Tensor:
        start, stop = self.vocab_range.start, self.vocab_range.stop
        here = (input_ids >= start) & (input_ids < stop)
        rows = torch.where(here, input_ids - start, 0)
        x = F.embedding(rows, self.weight) * here[:, None]
        return self.comm.all_reduce(x)


class MyDistributedCommunicator(DistributedCommunicator):
    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        widest = max(sizes)
        padded = torch.zeros(x.shape[0], widest, dtype=x.dtype, device=x.device)
        padded[:, : x.shape[1]] = x
        out = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(out, padded, group=self._data)
        return torch.cat([o[:, :n] for o, n in zip(out, sizes, strict=True)], dim=1)


class MyLockStepInbox(LockStepInbox):
    def receive(self, blocking: bool) -> list[Order] | None:
        if blocking:
            if len(self._mailbox) == 0:
                self._on_idle()
            self._mailbox.wait()
        messages = self._mailbox.take(self._broadcast(len(self._mailbox)))
        orders = [self._decode(m) for m in messages]
        for order in orders:
            if isinstance(order, Stop):
                return None
        return orders
