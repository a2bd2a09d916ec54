"""2.4: forgets V."""

from __future__ import annotations

import torch

from minisgl.models.config import ModelConfig
from minisgl.stage2.contiguous_cache import ContiguousCache

kills = "tests/exercises/test_stage2.py::test_bytes_of_a_model_of_known_size"
words = "twice"


class MyContiguousCache(ContiguousCache):
    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        return config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
