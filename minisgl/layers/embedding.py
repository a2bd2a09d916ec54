"""The vocabulary's two matrices, cut over ranks by rows: ids to vectors, vectors to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minisgl.core.protocols import Communicator
from minisgl.layers.linear import LocalLinear
from minisgl.layers.shard import shard_range, shard_sizes
from minisgl.learn import exercise


class VocabParallelEmbedding(nn.Module):
    """Rows `vocab_range` of the table are here. weight: [local_vocab, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, comm: Communicator) -> None:
        super().__init__()
        self.vocab_range = shard_range(vocab_size, comm.rank, comm.size)
        self.weight = nn.Parameter(torch.empty(len(self.vocab_range), hidden_size))
        self.comm = comm

    @exercise("6.4")
    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: int32 [tokens]. Returns [tokens, hidden]. Each id is on one rank; the others add zeros."""
        if self.comm.size == 1:
            return F.embedding(input_ids, self.weight)  # [tokens, hidden]
        local = input_ids - self.vocab_range.start  # [tokens]
        elsewhere = (local < 0) | (local >= len(self.vocab_range))  # [tokens]
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)  # [tokens, hidden]
        return self.comm.all_reduce(x.masked_fill_(elsewhere[:, None], 0))


class ParallelLMHead(LocalLinear):
    """Each rank computes the logits of its rows. weight: [local_vocab, hidden]. Whoever needs them all gathers them:
    who chooses a token rarely does.

    tied_to: the embedding whose parameter is this layer's too.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, comm: Communicator, tied_to: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__(hidden_size, len(shard_range(vocab_size, comm.rank, comm.size)), bias=False)
        if tied_to is not None:
            self.weight = tied_to.weight
        self.vocab_sizes = shard_sizes(vocab_size, comm.size)
        self.comm = comm

    def gather(self, logits: Tensor) -> Tensor:
        """logits: [rows, local_vocab], as `forward` gives them. Returns [rows, vocab], the same on all ranks."""
        return self.comm.all_gather(logits, self.vocab_sizes)

    def whole(self, x: Tensor) -> Tensor:
        """x: [rows, hidden]. Returns [rows, vocab]."""
        return self.gather(self(x))
