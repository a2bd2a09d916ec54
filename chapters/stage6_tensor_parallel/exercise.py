"""Stage 6, tensor parallel: your code.

`minisgl start 6` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check 6` says how you stand, `minisgl hint 6.1` helps.
A method may use the rest of its class, and what is imported here; methods that you add beside it are yours too.

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
    def read(self, checkpoint: Any) -> Tensor:
        """checkpoint: this piece's tensor there, of two dimensions or one. It reads from the file only what is asked
        of it by an index."""
        raise NotImplementedError("exercise 6.2")


class MyReadingPlan(ReadingPlan):
    # 6.2 what a rank reads
    def parts(
        self, parameter: str, prefix: str, module: str, kind: str, expert: int | None = None
    ) -> Iterator[tuple[str, Piece]]:
        """The parts of SHARDING[module], this rank's slice of each, one after another in the parameter. A part's name
        in the checkpoint is prefix, part, ".", kind ("weight" or "bias")."""
        raise NotImplementedError("exercise 6.2")


class MyLinearRowParallel(LinearRowParallel):
    # 6.3 add up what is cut by rows
    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, local_inputs]. Returns [tokens, outputs], the same on every rank."""
        raise NotImplementedError("exercise 6.3")


class MyVocabParallelEmbedding(VocabParallelEmbedding):
    # 6.4 embed a vocabulary that is cut
    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: int32 [tokens]. Returns [tokens, hidden]. Each id is on one rank; the others add zeros."""
        raise NotImplementedError("exercise 6.4")


class MyDistributedCommunicator(DistributedCommunicator):
    # 6.5 gather the logits
    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """x: [rows, sizes[rank]] on each rank. Returns [rows, sum(sizes)], the same on all.

        The collective wants equal shapes, so each shard is padded to the widest.
        """
        raise NotImplementedError("exercise 6.5")


class MyLockStepInbox(LockStepInbox):
    # 6.6 ranks in lock step
    def receive(self, blocking: bool) -> list[Order] | None:
        """As many messages as rank 0 has, the same on all ranks. blocking: wait for the first, before they agree on a
        number. None: one of them is Stop."""
        raise NotImplementedError("exercise 6.6")
