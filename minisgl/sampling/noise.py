"""Random numbers that depend on nothing but (seed, position, token): no generator, no state. Knows no logits.

Counter-based, as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), so that a row's draw is the
same in any batch, on any rank, and again after a retraction. Integers wrap around, as torch's do on every device.
Mixers: SplitMix64's (Steele, Lea, Flood, OOPSLA 2014) for a row, MurmurHash3's 32-bit one (Appleby) for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # 2**64 / golden ratio, odd; here and below: signed, as torch's integers are
_MIX64 = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_MIX32 = (0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32)
_BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Both int64 [rows]. Returns int64 [rows]: different for different pairs, but for chance."""
    return _mix64(_mix64(seeds) + positions * _GAMMA)


def token_hashes(keys: Tensor, token_ids: Tensor) -> Tensor:
    """keys: int64 [rows]; token_ids: int32 [vocab]. Returns int32 [rows, vocab], all 32 bits uniform.

    Half of the key is a (made odd) step and half the start of the sequence that is mixed.
    """
    step = ((keys >> 32) | 1).to(torch.int32)[:, None]
    start = keys.to(torch.int32)[:, None]
    x = token_ids * step + start  # [rows, vocab]
    x ^= _shift32(x, 16)
    x *= _MIX32[0]
    x ^= _shift32(x, 13)
    x *= _MIX32[1]
    x ^= _shift32(x, 16)
    return x


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel, -log(-log(uniform)): float32 [rows, vocab]. Finite everywhere."""
    return _gumbel(token_hashes(row_keys(seeds, positions), token_ids))


def _gumbel(hashes: Tensor) -> Tensor:
    # 31 bits, the middle of each step, so never 0. The largest noise comes from near 0, where a float32 is finest.
    uniform = (hashes & 0x7FFFFFFF).float().add_(0.5).mul_(2**-31).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift64(x, 30)) * _MIX64[0]
    x = (x ^ _shift64(x, 27)) * _MIX64[1]
    return x ^ _shift64(x, 31)


def _shift64(x: Tensor, bits: int) -> Tensor:
    """To the right, filled with zeros; torch's own >> repeats the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _shift32(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_(2 ** (32 - bits) - 1)
