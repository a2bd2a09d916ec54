"""The KV cache of one sequence, one slot after the other. Knows nothing of other sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.learn import exercise
from minisgl.models.config import ModelConfig


class ContiguousCache:
    """[K or V, layer, slot, head, head_dim]: slot n holds token n. Room for max_seq_len tokens is taken at once."""

    page_size = 1

    def __init__(self, config: ModelConfig, max_seq_len: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (2, config.num_layers, max_seq_len, config.num_kv_heads, config.head_dim)
        self._kv = torch.zeros(shape, dtype=dtype, device=device)

    def k_cache(self, layer_id: int) -> Tensor:
        return self._kv[0, layer_id]

    def v_cache(self, layer_id: int) -> Tensor:
        return self._kv[1, layer_id]

    @exercise("2.1")
    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        """Append. k and v: [tokens, kv_heads, head_dim]; out_loc: int32 [tokens], the positions of the tokens."""
        self.k_cache(layer_id)[out_loc] = k
        self.v_cache(layer_id)[out_loc] = v

    @staticmethod
    @exercise("2.4")
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """What each token of context costs to keep: a K and a V, head_dim numbers of this dtype each, for every KV
        head of every layer."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
