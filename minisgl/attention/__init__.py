"""Attention backends, by the name that `--attn` gives them. Knows nothing of engines."""

from __future__ import annotations

from minisgl.attention.choose import check_attention, create_attention

__all__ = ["check_attention", "create_attention"]
