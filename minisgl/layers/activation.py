"""The gates of an MLP: one half of the projection opens the other (Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class SiluAndMul(nn.Module):
    def forward(self, gate_up: Tensor) -> Tensor:
        """silu(gate) × up. gate_up: [tokens, 2 × size], gate first. Returns [tokens, size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up  # [tokens, size]


class GeluAndMul(nn.Module):
    def __init__(self, approximate: str) -> None:
        """approximate: "tanh", or "none" for the exact one."""
        super().__init__()
        self.approximate = approximate

    def forward(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) × up. gate_up: [tokens, 2 × size], gate first. Returns [tokens, size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate=self.approximate) * up  # [tokens, size]


def create_gate(hidden_act: str) -> nn.Module:
    """For a `ModelConfig.hidden_act`. gelu_new and gelu_pytorch_tanh are one function under two names."""
    if hidden_act == "silu":
        return SiluAndMul()
    return GeluAndMul("none" if hidden_act == "gelu" else "tanh")
