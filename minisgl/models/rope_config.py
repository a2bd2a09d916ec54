"""Which rotary embedding a configuration asks for, under its old and its new key names. Computes no angle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from minisgl.models.config_keys import Keys, UnsupportedModel

_HARMLESS = frozenset(("finetuned",))
_NEUTRAL: Mapping[str, Any] = {"partial_rotary_factor": 1.0}


@dataclass(frozen=True)
class RopeConfig:
    """factor and original_max_position belong to the scaled kinds, the fields below them to one kind each."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it

    @classmethod
    def from_keys(cls, keys: Keys, max_position: int) -> RopeConfig:
        """Takes rope_theta, rope_scaling (old) and rope_parameters (transformers 5) from config.json."""
        theta = keys.number("rope_theta", default=10000.0)
        old, new = keys.take("rope_scaling", default={}), keys.take("rope_parameters", default={})
        data, where = (old, "rope_scaling") if old else (new, "rope_parameters")
        if not isinstance(data, dict):
            raise UnsupportedModel(f"{where} must be an object, not {data!r:.80}")
        rope = Keys(data, where, {}, _HARMLESS, _NEUTRAL)
        theta = rope.number("rope_theta", default=theta)
        legacy_kind = rope.take("type", default="default")
        kind = rope.take("rope_type", default=legacy_kind)
        if kind == "default":
            config = cls(theta)
        elif kind == "linear":
            config = cls(theta, "linear", rope.number("factor"))
        elif kind == "llama3":
            config = _llama3(rope, theta, max_position)
        elif kind == "yarn":
            config = _yarn(rope, theta, max_position)
        else:
            raise UnsupportedModel(f"rope type {kind!r:.80} is not supported, only default, linear, llama3 and yarn")
        rope.refuse_the_rest()
        return config

    def reach(self, max_position: int) -> int:
        """YaRN is often asked for without raising max_position_embeddings: its own keys say how far it goes."""
        return max(max_position, int(self.original_max_position * self.factor)) if self.kind == "yarn" else max_position


def _llama3(rope: Keys, theta: float, max_position: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise UnsupportedModel(f"high_freq_factor {high:g} must be more than low_freq_factor {low:g}")
    return RopeConfig(
        theta,
        "llama3",
        factor=rope.number("factor"),
        original_max_position=rope.integer("original_max_position_embeddings", default=max_position),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: Keys, theta: float, max_position: int) -> RopeConfig:
    original = rope.integer("original_max_position_embeddings", default=max_position)
    factor = rope.number("factor", default=max_position / original)
    inferred = _yarn_mscale(factor, 1.0)
    mscale, mscale_all_dim = rope.take("mscale", default=None), rope.take("mscale_all_dim", default=None)
    if mscale is not None and mscale_all_dim is not None:
        inferred = _yarn_mscale(factor, rope.number("mscale")) / _yarn_mscale(factor, rope.number("mscale_all_dim"))
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.boolean("truncate", default=True),
        attention_factor=rope.number("attention_factor", default=inferred),
    )


def _yarn_mscale(factor: float, scale: float) -> float:
    """How much cos and sin grow when positions are stretched by factor (YaRN, section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
