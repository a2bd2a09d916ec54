"""The five linear layers of a tensor-parallel transformer. They know which slice they hold, not what it means.

Columns first, rows second (Megatron-LM, Shoeybi et al., 2019): a column-parallel layer computes some of the
outputs and needs no communication; the row-parallel layer after it takes just those as its inputs, and its
partial sums are added over the ranks. Weights are [outputs, inputs], so "columns" of the mathematics are rows here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minisgl.core.protocols import Communicator
from minisgl.layers.shard import Heads, kv_head_range, q_head_range, shard_range


class LinearReplicated(nn.Module):
    """Every rank holds and computes all of it. weight: [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)  # [tokens, outputs]


class LinearColParallelMerged(LinearReplicated):
    """Several projections of the same input in one product. A rank holds its share of each, one after another."""

    def __init__(self, inputs: int, outputs: Sequence[int], bias: bool, comm: Communicator) -> None:
        super().__init__(inputs, sum(len(shard_range(size, comm.rank, comm.size)) for size in outputs), bias)


class LinearQKVMerged(LinearReplicated):
    """The q, k and v projections in one product, cut between KV groups: a rank's q heads, its k and v heads."""

    def __init__(self, inputs: int, heads: Heads, head_dim: int, bias: bool, comm: Communicator) -> None:
        num_heads = len(q_head_range(heads, comm)) + 2 * len(kv_head_range(heads, comm))
        super().__init__(inputs, num_heads * head_dim, bias)


class LinearRowParallel(nn.Module):
    """A rank holds all outputs of some inputs: its product is one term of the sum. weight: [outputs, local_inputs]."""

    def __init__(self, local_inputs: int, outputs: int, bias: bool, comm: Communicator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, local_inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, local_inputs]. Returns [tokens, outputs], the same on every rank."""
        bias = self.bias if self.comm.rank == 0 else None  # in the sum once
        return self.comm.all_reduce(F.linear(x, self.weight, bias))


class LinearOProj(LinearRowParallel):
    """Attention's output projection. Its inputs are the rank's q heads, which are cut by KV group."""

    def __init__(self, heads: Heads, head_dim: int, outputs: int, bias: bool, comm: Communicator) -> None:
        super().__init__(len(q_head_range(heads, comm)) * head_dim, outputs, bias, comm)
