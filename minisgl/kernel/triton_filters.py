"""The lowest logit that top-k, top-p and min-p leave of each row, in one kernel. Knows nothing of drawing a token.

The reference is `TokenFilters`: its order, its ties. Nothing is sorted: both the k-th highest and the last of the
nucleus are "the highest value such that what is at least as high weighs at least so much", where a token weighs 1 for
top-k and its probability for top-p. A search between the bits of two floats finds it, as radix selection does.

To search a whole row is to read it a dozen times. So one pass sets aside the four highest of each lane (a lane is
every 4096th token), and these are searched; the row itself only where a lane's fourth may hide a fifth that counts.
What is found without those that hide is never too high, so the search of the row goes on from there.

A mass is summed over a lane in order, and over lanes as integers: in any layout it is the same to the last bit. So what
a row keeps does not depend on its batch, nor on whether its logits come as bfloat16 or, penalized, as float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton_runs import launches_early
from minisgl.sampling.args import BatchSamplingArgs

_LANES = 4096
_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13}  # that each value's float32 ends in


def lowest_logits(logits: Tensor, args: BatchSamplingArgs) -> Tensor:
    """Tokens below it may not be drawn: float32 [rows], -inf for a row that keeps all.

    logits: [rows, vocab], rows may lie apart; args: with temperatures and seeds.
    """
    rows, vocab = logits.shape
    floors = torch.empty(rows, dtype=torch.float32, device=logits.device)
    own = torch.empty((rows, 4 * _LANES), dtype=logits.dtype, device=logits.device)
    asked = [args.top_k, args.top_p, args.min_p]
    unread = [args.seeds, args.temperatures, args.temperatures]  # of the same dtypes: one compiled kernel for all
    pdl = launches_early(logits.device)
    _lowest_logit[(rows,)](
        logits, args.temperatures, *(unread[i] if x is None else x for i, x in enumerate(asked)), own, floors,
        vocab, logits.stride(0), sum(1 << i for i, x in enumerate(asked) if x is not None),
        _ZERO_BITS.get(logits.dtype, 0), _LANES, pdl,
        num_warps=16, maxnreg=64, launch_pdl=pdl,  # two rows at a time on a multiprocessor
    )  # fmt: skip
    return floors


@triton.jit(do_not_specialize=["asks"])
def _lowest_logit(
    logits, temperatures, top_k, top_p, min_p, own, floors, vocab, stride, asks,
    SHIFT: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k + row, mask=(asks & 1) != 0, other=vocab)
    p = tl.load(top_p + row, mask=(asks & 2) != 0, other=1.0)
    least = tl.load(min_p + row, mask=(asks & 4) != 0, other=0.0)
    floor = tl.full((), float("-inf"), tl.float32)
    if (k < vocab) | (p < 1) | (least > 0):
        source, own, temperature = logits + row * stride, own + row * (4 * LANES), tl.load(temperatures + row)
        lowest, peak, hidden = _set_aside(source, own, vocab, LANES)
        end, scale = _key(peak, SHIFT) + 1, 1.4426950408889634 / temperature
        low = _key(floor, SHIFT)
        if k < vocab:
            if k <= LANES:
                low = _key(lowest, SHIFT)  # each lane has one that high
            low = _threshold(source, own, vocab, hidden, low, end, k, peak, scale, False, SHIFT, LANES)
        if p < 1:
            few = hidden < _value(low, SHIFT)
            competing, size = tl.where(few, own, source), tl.where(few, 4 * LANES, vocab)
            total = _mass(competing, size, _value(low, SHIFT), peak, scale, LANES)
            # Tokens below this share of the peak, even `vocab` of them, have less than 1 - p of the mass.
            share = (1 - p) * (total.to(tl.float32) * 9.094947017729282e-13) / vocab
            low = tl.maximum(low, _key(peak + temperature * tl.log(share), SHIFT))
            limit = tl.maximum((total.to(tl.float64) * p).to(tl.int64), 1)
            low = _threshold(source, own, vocab, hidden, low, end, limit, peak, scale, True, SHIFT, LANES)
        floor = _value(low, SHIFT)
        if least > 0:
            floor = tl.maximum(floor, peak + temperature * tl.log(least))
    tl.store(floors + row, floor)


@triton.jit
def _set_aside(source, own, size, LANES: tl.constexpr):
    """Each lane's four highest to `own`. Returns the lowest and highest of the lanes' maxima, and the highest of the
    fourths: what is above that is all set aside."""
    lane = tl.arange(0, LANES)
    a = tl.full((LANES,), float("-inf"), tl.float32)
    b, c, d = a, a, a
    for start in tl.range(0, size, LANES, loop_unroll_factor=2):
        x = tl.load(source + start + lane, mask=start + lane < size, other=float("-inf")).to(tl.float32)
        a, x = tl.maximum(a, x), tl.minimum(a, x)
        b, x = tl.maximum(b, x), tl.minimum(b, x)
        c, x = tl.maximum(c, x), tl.minimum(c, x)
        d = tl.maximum(d, x)
    tl.store(own + lane, a)
    tl.store(own + LANES + lane, b)
    tl.store(own + 2 * LANES + lane, c)
    tl.store(own + 3 * LANES + lane, d)
    tl.debug_barrier()
    return tl.min(a), tl.max(a), tl.max(d)


@triton.jit
def _threshold(
    source, own, vocab, hidden, low, end, limit, peak, scale,
    MASS: tl.constexpr, SHIFT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """`_search` of what was set aside, and if that may lack some that count, of the row, from there on."""
    low = _search(own, 4 * LANES, low, end, limit, peak, scale, MASS, SHIFT, LANES)
    if hidden > _value(low, SHIFT):
        low = _search(source, vocab, low, end, limit, peak, scale, MASS, SHIFT, LANES)
    return low


@triton.jit
def _search(source, size, low, end, limit, peak, scale, MASS: tl.constexpr, SHIFT: tl.constexpr, LANES: tl.constexpr):
    """The highest key of those from `low` on and below `end`, such that elements from it on weigh `limit` or more; low
    if there is none. An element weighs 1, or with MASS exp((x - peak) / temperature)."""
    lane, none = tl.arange(0, LANES), tl.zeros((LANES,), tl.float32)
    while end - low > 1:
        keys = end - low
        a, b = _value(low + (keys >> 2), SHIFT), _value(low + (keys * 2 >> 2), SHIFT)
        c = _value(low + (keys * 3 >> 2), SHIFT)
        from_a, from_b, from_c = none, none, none
        for start in tl.range(0, size, LANES, loop_unroll_factor=2):
            x = tl.load(source + start + lane, mask=start + lane < size, other=float("-inf")).to(tl.float32)
            weight = tl.exp2((x - peak) * scale) if MASS else 1.0
            from_a += tl.where(x >= a, 1.0, 0.0) * weight
            from_b += tl.where(x >= b, 1.0, 0.0) * weight
            from_c += tl.where(x >= c, 1.0, 0.0) * weight
        weights = _sum(tl.join(tl.join(from_a, from_b), tl.join(from_c, none)), MASS)  # [2, 2]: one sum takes less time
        held = tl.sum(tl.sum((weights >= limit).to(tl.int64), axis=0), axis=0)
        end = low + (keys * (held + 1) >> 2)
        low += keys * held >> 2
    return low


@triton.jit
def _mass(source, size, lowest, peak, scale, LANES: tl.constexpr):
    """The mass of the elements that are at least `lowest`."""
    lane = tl.arange(0, LANES)
    mass = tl.zeros((LANES,), tl.float32)
    for start in tl.range(0, size, LANES, loop_unroll_factor=2):
        x = tl.load(source + start + lane, mask=start + lane < size, other=float("-inf")).to(tl.float32)
        mass += tl.where(x >= lowest, 1.0, 0.0) * tl.exp2((x - peak) * scale)
    return _sum(mass, True)


@triton.jit
def _sum(weights, MASS: tl.constexpr):
    """Over lanes, as integers: int32, or with MASS int64 in units of 2 ** -40."""
    return tl.sum((weights * 1099511627776.0).to(tl.int64), axis=0) if MASS else tl.sum(weights.to(tl.int32), axis=0)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """float32 to integers of the same order, without the last SHIFT bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The lowest float32 that has the key; if it is that of a value, the value."""
    bits = key ^ ((key >> 63) & (0x7FFFFFFF >> SHIFT))
    return (bits << SHIFT).to(tl.int32).to(tl.float32, bitcast=True)
