"""Norms, gates, rotations and products against transformers' or torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from minisgl.kernel.linear import linear, pack_linear
from minisgl.layers.activation import create_gate
from minisgl.layers.norm import RMSNorm, RMSNormFused
from minisgl.layers.rotary import RotaryEmbedding, Rotation
from minisgl.models.config import ACTIVATIONS
from minisgl.models.rope_config import RopeConfig

DTYPES = [torch.float32, torch.bfloat16]


def norms(norm_class: type[RMSNorm], dtype: torch.dtype) -> tuple[RMSNorm, LlamaRMSNorm]:
    ours, theirs = norm_class(48, 1e-3), LlamaRMSNorm(48, 1e-3)
    weight = torch.rand(48) + 0.5
    for norm in (ours, theirs):
        norm.weight.data = weight.to(dtype)
    return ours.requires_grad_(False), theirs.requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_rms_norm(dtype: torch.dtype, scale: float) -> None:
    """Bit for bit: the roundings are part of the model."""
    ours, theirs = norms(RMSNorm, dtype)
    x = (torch.randn(5, 3, 48) * scale).to(dtype)
    before = x.clone()
    torch.testing.assert_close(ours(x), theirs(x), atol=0, rtol=0)
    assert torch.equal(x, before), "the input is somebody's residual: it must not change"


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_norm_hands_the_residual_on(dtype: torch.dtype) -> None:
    ours, theirs = norms(RMSNormFused, dtype)
    x, residual = torch.randn(5, 48, dtype=dtype), torch.randn(5, 48, dtype=dtype)
    first, handed = ours(x, None)
    assert torch.equal(first, theirs(x))
    assert torch.equal(handed, x)
    normed, total = ours(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, theirs(x + residual))


@pytest.mark.parametrize("hidden_act", ACTIVATIONS)
def test_gates(hidden_act: str) -> None:
    gate, up = torch.randn(7, 30) * 3, torch.randn(7, 30)
    ours = create_gate(hidden_act)(torch.cat((gate, up), dim=-1))
    torch.testing.assert_close(ours, ACT2FN[hidden_act](gate) * up, atol=1e-6, rtol=1e-6)


def rotation(positions: torch.Tensor, head_dim: int = 16) -> Rotation:
    table = RotaryEmbedding(RopeConfig(theta=100.0), head_dim, 64, torch.float32, torch.device("cpu"))
    return table(positions)


def test_rotation_is_that_of_transformers() -> None:
    turn = rotation(torch.tensor([0, 1, 7, 63]))
    x = torch.randn(4, 5, 16)
    half = turn.signed_sin[..., 8:]
    expected, _ = apply_rotary_pos_emb(x, x, turn.cos[:, 0], torch.cat((half, half), -1)[:, 0], unsqueeze_dim=1)
    torch.testing.assert_close(turn.apply(x), expected, atol=1e-6, rtol=0)


def test_only_the_distance_counts() -> None:
    """What makes it a position embedding: q at m times k at n depends on m - n."""
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(m: int, n: int) -> float:
        return float((rotation(torch.tensor([m])).apply(q) * rotation(torch.tensor([n])).apply(k)).sum())

    assert math.isclose(score(9, 4), score(41, 36), abs_tol=1e-4)
    assert not math.isclose(score(9, 4), score(9, 5), abs_tol=1e-2)


def test_the_table_is_as_long_as_asked() -> None:
    table = RotaryEmbedding(RopeConfig(), 16, 64, torch.bfloat16, torch.device("cpu")).table
    assert table.shape == (64, 16)
    assert table.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 16, 33])
def test_packed_product(dtype: torch.dtype, rows: int) -> None:
    """Whatever order the weight is kept in (float64 stays plain everywhere)."""
    weight, bias = torch.randn(40, 24, dtype=dtype), torch.randn(40, dtype=dtype)
    packed = pack_linear(weight)
    assert packed.shape == weight.shape
    assert packed.dtype == dtype
    for x in (torch.randn(rows, 24, dtype=dtype), torch.randn(rows, 48, dtype=dtype)[:, ::2]):
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(linear(x, packed, bias), F.linear(x, weight, bias), atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(linear(x, packed, None), F.linear(x, weight), atol=tolerance, rtol=tolerance)
