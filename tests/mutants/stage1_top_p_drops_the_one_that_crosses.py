"""1.4: compares with the mass that includes the token itself."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.sampling.filters import TokenFilters

kills = "tests/exercises/test_stage1.py::test_the_token_that_crosses_top_p_stays"
words = "crosses it stays"


class MyTokenFilters(TokenFilters):
    def top_p_threshold(self, ranked: Tensor, log_total: Tensor, top_p: Tensor) -> Tensor:
        probs = (ranked - log_total).exp()  # [rows, n]
        above = probs.cumsum(dim=1)  # [rows, n]
        outside = above >= top_p[:, None]
        lowest = ranked.masked_fill(outside, torch.inf).amin(dim=1, keepdim=True)  # [rows, 1]
        return lowest.masked_fill(top_p[:, None] >= 1, -torch.inf)
