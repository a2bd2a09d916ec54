"""Stage 6, tensor parallel: your code.

`minisgl start 6` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check 6` says how you stand, `minisgl hint 6.1` helps.
A method may use the rest of its class, and what is imported here; what it needs of both is listed above it. Methods
that you add beside it are yours too.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

# ruff: noqa: F401 (imports for the answers)
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
    #   self.rank, self.size   this rank's number, and how many there are; self.kv(): yours too
    #   self.heads.num_heads, self.heads.num_kv_heads   the model's, whole
    #   shard_range(total, rank, size) -> range   this rank's of `total`, in order; a ValueError if a rank would have
    #       none
    def kv(self) -> range:
        """The KV heads. With more ranks than KV heads each head is held by several ranks, as many for all.

        Raises ValueError when that would not come out even.
        """
        raise NotImplementedError("exercise 6.1")

    def q(self) -> range:
        """The q heads: all those of its KV heads, or its share of them where the KV head is replicated."""
        raise NotImplementedError("exercise 6.1")


class MyPiece(Piece):
    # 6.2 what a rank reads
    #   self.dim      0 or 1: the dimension that is cut
    #   self.source   range: what of the checkpoint's tensor, along dim, is this rank's
    def read(self, checkpoint: Any) -> Tensor:
        """checkpoint: this piece's tensor there, of two dimensions or one. It reads from the file only what is asked
        of it by an index."""
        raise NotImplementedError("exercise 6.2")


class MyReadingPlan(ReadingPlan):
    # 6.2 what a rank reads
    #   SHARDING[module] -> (dim, parts)   parts: pairs of a name in the checkpoint and its units, "kv heads" for one
    #   self.cut(units, of_expert) -> (source, total)   this rank's range, and the whole's size; of_expert: bool
    #   Piece(parameter, expert, dim, source, total, offset)   offset: where it begins in the parameter, along dim
    def parts(
        self, parameter: str, prefix: str, module: str, kind: str, expert: int | None = None
    ) -> Iterator[tuple[str, Piece]]:
        """The parts of SHARDING[module], this rank's slice of each, one after another in the parameter. A part's name
        in the checkpoint is prefix, part, ".", kind ("weight" or "bias")."""
        raise NotImplementedError("exercise 6.2")


class MyLinearRowParallel(LinearRowParallel):
    # 6.3 add up what is cut by rows
    #   self.product(x, bias)   x times this rank's weight, plus the bias, which may be None
    #   self.bias       Tensor [outputs] or None, whole on every rank
    #   self.comm.rank; self.comm.all_reduce(x)   returns the sum of what all ranks gave
    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, local_inputs]. Returns [tokens, outputs], the same on every rank."""
        raise NotImplementedError("exercise 6.3")


class MyVocabParallelEmbedding(VocabParallelEmbedding):
    # 6.4 embed a vocabulary that is cut
    #   self.weight        [local_vocab, hidden]: the rows of this rank's ids
    #   self.vocab_range   range: those ids
    #   self.comm.size; self.comm.all_reduce(x)   returns the sum of what all ranks gave
    #   F.embedding(ids, weight)   PyTorch's: rows of weight; an id that is no row is an error
    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: int32 [tokens]. Returns [tokens, hidden]. Each id is on one rank; the others add zeros."""
        raise NotImplementedError("exercise 6.4")


class MyDistributedCommunicator(DistributedCommunicator):
    # 6.5 gather the logits
    #   self.size   how many ranks there are
    #   self._collective(dist.all_gather, outputs, shard, group=self._data)   outputs: a list of tensors, one for each
    #       rank, all of shard's shape; shard must be contiguous, in memory
    #   F.pad(x, (left, right))   PyTorch's: columns of zeros before and after
    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """x: [rows, sizes[rank]] on each rank. Returns [rows, sum(sizes)], the same on all.

        The collective wants equal shapes, so each shard is padded to the widest.
        """
        raise NotImplementedError("exercise 6.5")


class MyLockStepInbox(LockStepInbox):
    # 6.6 ranks in lock step
    #   self._mailbox   len(…): messages that have come; .wait(): until there is one; .take(count): bytes of the next
    #       count, also of those that have still to come
    #   self._broadcast(value) -> int   rank 0's value, on every rank: all must call it
    #   self._decode(message) -> Order; Stop is the one that ends the loop
    #   self._on_idle()   to be called before waiting with an empty mailbox
    def receive(self, blocking: bool) -> list[Order] | None:
        """As many messages as rank 0 has, the same on all ranks. blocking: wait for the first, before they agree on a
        number. None: one of them is Stop."""
        raise NotImplementedError("exercise 6.6")
