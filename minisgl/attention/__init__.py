"""Attention backends, by the name that `--attn` gives them. Knows nothing of engines."""

from __future__ import annotations

from collections.abc import Callable

from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.core.protocols import AttentionBackend

_BACKENDS: dict[str, Callable[[int, int, int, int], AttentionBackend]] = {"torch": PagedTorchAttention}


def create_attention(name: str, num_q_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> AttentionBackend:
    """Heads of this rank. "auto" is the best backend that runs here. Raises ValueError for a name it does not know."""
    chosen = "torch" if name == "auto" else name
    if chosen not in _BACKENDS:
        raise ValueError(f"attention backend must be auto, {', '.join(_BACKENDS)}, not {name!r:.80}")
    return _BACKENDS[chosen](num_q_heads, num_kv_heads, head_dim, page_size)
