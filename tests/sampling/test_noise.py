"""Counter-based noise: the integers against Python's, and the statistics of what is made of them. Fixed seeds."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.sampling.noise import _gumbel, gumbel_noise, row_keys, token_hashes

M32, M64 = 2**32 - 1, 2**64 - 1
VOCAB = torch.arange(4096, dtype=torch.int32)


def mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & M64
    return x ^ (x >> 31)


def mix32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B & M32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & M32
    return x ^ (x >> 16)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.lists(st.integers(0, 300_000), min_size=1, max_size=40))
def test_integers_are_those_of_the_published_mixers(seed: int, position: int, tokens: list[int]) -> None:
    key = mix64(mix64(seed) + position * 0x9E3779B97F4A7C15 & M64)
    expected = [mix32((token * ((key >> 32) | 1) + key) & M32) for token in tokens]
    keys = row_keys(torch.tensor([seed]), torch.tensor([position]))
    assert int(keys) & M64 == key
    hashes = token_hashes(keys, torch.tensor(tokens, dtype=torch.int32))
    assert [h & M32 for h in hashes[0].tolist()] == expected


def chi_square(values: torch.Tensor, bins: int) -> float:
    """values in [0, 1)."""
    counts = torch.bincount((values.flatten() * bins).long(), minlength=bins).double()
    expected = values.numel() / bins
    return float(((counts - expected) ** 2 / expected).sum())


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What the noise was made of, back from the noise: float64 [rows, vocab]."""
    return (-(-gumbel_noise(seeds, positions, VOCAB).double()).exp()).exp().clamp(max=1 - 2**-53)


def test_uniform_over_tokens_positions_and_seeds() -> None:
    """99 degrees of freedom: 149 is exceeded once in a thousand. Neighbouring seeds and positions are the hard case."""
    zero, count = torch.zeros(64, dtype=torch.int64), torch.arange(64)
    for seeds, positions in ((zero, count), (count, zero), (count, count)):
        values = uniforms(seeds, positions)
        assert chi_square(values, 100) < 149
        assert chi_square(values[:, :64], 100) < 149
        assert chi_square(values[:, 5], 4) < 16.3  # one token: 3 degrees of freedom


def test_neighbours_are_independent() -> None:
    """Pairs of uniforms fill the square: 99 degrees of freedom again."""
    values = uniforms(torch.arange(64), torch.arange(64) * 7)
    pairs = {
        "tokens": (values[:, :-1], values[:, 1:]),
        "rows": (values[:-1], values[1:]),
        "position and seed": (
            uniforms(torch.arange(1, 33), torch.arange(32)),
            uniforms(torch.arange(32), torch.arange(1, 33)),
        ),
    }
    for name, (a, b) in pairs.items():
        square = ((a * 10).floor() * 10 + (b * 10).floor()) / 100 + 0.001
        assert chi_square(square, 100) < 149, name


def test_noise_is_gumbel_and_finite() -> None:
    noise = gumbel_noise(torch.arange(200), torch.arange(200), VOCAB)
    assert torch.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.577216) < 0.005  # Euler's constant; the error of this mean is 0.0014
    assert abs(float(noise.var()) - 1.644934) < 0.02  # pi ** 2 / 6
    assert float(noise.max()) > 11, "819,200 draws reach 13.6 on average: the tail is cut off"


def test_noise_is_finite_at_both_ends() -> None:
    """A uniform of 0 would make a token of any probability win, a uniform of 1 would forbid the only one left."""
    ends = torch.tensor([0, 1, 2**31 - 1, 2**31 - 2, -1, -(2**31)], dtype=torch.int32)
    noise = _gumbel(ends)
    assert torch.isfinite(noise).all()
    assert float(noise.max()) < 23
