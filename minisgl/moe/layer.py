"""A mixture-of-experts MLP in plain torch (Shazeer et al., 2017): the reference of `kernel/triton_moe.py`.

Tensor parallel, not expert parallel: a rank holds its share of every expert's intermediate size, so that ranks
have the same work however tokens choose, and one all-reduce adds the shares up.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minisgl.core.protocols import Communicator
from minisgl.layers.activation import create_gate
from minisgl.layers.linear import LinearReplicated
from minisgl.layers.shard import shard_range
from minisgl.models.config import ModelConfig


class Experts(nn.Module):
    """gate_up_proj: [experts, 2 × local_size, hidden], gate first. down_proj: [experts, hidden, local_size]."""

    def __init__(self, config: ModelConfig, comm: Communicator) -> None:
        super().__init__()
        size = len(shard_range(config.moe_intermediate_size, comm.rank, comm.size))
        shape = config.num_experts, 2 * size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Parameter(torch.empty(shape[0], shape[2], size))
        self.gate = create_gate(config.hidden_act)

    def forward(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """x: [tokens, hidden]; weights and expert_ids: [tokens, top_k]. Returns [tokens, hidden], the rank's term.

        Tokens are sorted by expert, so that each expert that is used at all reads its weights once.
        """
        top_k = expert_ids.shape[1]
        order = expert_ids.flatten().argsort(stable=True)  # [tokens × top_k]
        counts = expert_ids.flatten().bincount(minlength=len(self.down_proj)).tolist()
        out = torch.zeros_like(x)
        for expert, rows in enumerate(order.split(counts)):
            if len(rows):
                token = rows // top_k  # [rows]
                y = F.linear(self.gate(F.linear(x[token], self.gate_up_proj[expert])), self.down_proj[expert])
                out.index_add_(0, token, y * weights.flatten()[rows, None])
        return out


class MoELayer(nn.Module):
    waits_for_host = True  # for the counts of Experts.forward; kernels in its place need none

    def __init__(self, config: ModelConfig, comm: Communicator) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = config.top_k, config.norm_topk_prob
        self.gate = LinearReplicated(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config, comm)
        self.comm = comm

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, hidden]. Returns the weights, in x's dtype, and the ids of each token's experts, [tokens, top_k].

        The softmax is over all experts; norm_topk_prob makes the weights of the chosen ones sum to one.
        """
        probs = F.softmax(self.gate(x), dim=-1, dtype=torch.float32)  # [tokens, experts]
        weights, expert_ids = probs.topk(self.top_k, dim=-1)  # [tokens, top_k]
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), expert_ids

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden]. Returns the same shape."""
        return self.comm.all_reduce(self.experts(x, *self.route(x)))


def waits_for_host(model: nn.Module) -> bool:
    """Whether a forward has to know on the host what its experts were chosen for: no graph can hold that."""
    return any(isinstance(module, MoELayer) and module.waits_for_host for module in model.modules())
