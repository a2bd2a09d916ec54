"""2.2: counts from the first key."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.attention.contiguous import ContiguousAttention

kills = "tests/attention/test_backends.py::test_a_mask_is_causal_from_the_end"
words = "m - n + i"


class MyContiguousAttention(ContiguousAttention):
    def causal_mask(self, n: int, m: int, device: torch.device) -> Tensor:
        return torch.ones(n, m, dtype=torch.bool, device=device).tril()
