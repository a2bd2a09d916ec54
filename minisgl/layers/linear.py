"""The five linear layers of a tensor-parallel transformer. They know which slice they hold, not what it means.

Columns first, rows second (Megatron-LM, Shoeybi et al., 2019): a column-parallel layer computes some of the
outputs and needs no communication; the row-parallel layer after it takes just those as its inputs, and its
partial sums are added over the ranks. Weights are [outputs, inputs]: the columns of the mathematics are rows here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minisgl.core.protocols import Communicator
from minisgl.kernel.linear import linear, pack_linear
from minisgl.layers.shard import Heads, RankHeads, shard_range
from minisgl.learn import exercise


class LocalLinear(nn.Module):
    """The part of a projection that one rank holds. weight: [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, inputs]. Returns [tokens, outputs]."""
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Alone, so that a faster one can take its place."""
        return linear(x, self.weight, bias)

    def pack(self) -> None:
        """Once loaded, keep the weight as the device likes to read it: no one looks into it from here on."""
        packed = pack_linear(self.weight)
        if packed is not self.weight:
            self.weight = nn.Parameter(packed, requires_grad=False)


class LinearReplicated(LocalLinear):
    """Every rank holds all of it."""


class LinearColParallelMerged(LocalLinear):
    """Several projections of the same input in one product. A rank holds its share of each, one after another."""

    def __init__(self, inputs: int, outputs: Sequence[int], bias: bool, comm: Communicator) -> None:
        super().__init__(inputs, sum(len(shard_range(size, comm.rank, comm.size)) for size in outputs), bias)


class LinearQKVMerged(LocalLinear):
    """The q, k and v projections in one product, cut between KV groups: a rank's q heads, its k and v heads."""

    def __init__(self, inputs: int, heads: Heads, head_dim: int, bias: bool, comm: Communicator) -> None:
        own = RankHeads(heads, comm.rank, comm.size)
        super().__init__(inputs, (len(own.q()) + 2 * len(own.kv())) * head_dim, bias)


class LinearRowParallel(LocalLinear):
    """A rank holds all outputs of its inputs: its product is one term of the sum."""

    def __init__(self, local_inputs: int, outputs: int, bias: bool, comm: Communicator) -> None:
        super().__init__(local_inputs, outputs, bias)
        self.comm = comm

    @exercise("6.3")
    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, local_inputs]. Returns [tokens, outputs], the same on every rank."""
        bias = self.bias if self.comm.rank == 0 else None  # in the sum once
        return self.comm.all_reduce(self.product(x, bias))


class LinearOProj(LinearRowParallel):
    """Attention's output projection. Its inputs are the rank's q heads, which are cut by KV group."""

    def __init__(self, heads: Heads, head_dim: int, outputs: int, bias: bool, comm: Communicator) -> None:
        super().__init__(len(RankHeads(heads, comm.rank, comm.size).q()) * head_dim, outputs, bias, comm)
