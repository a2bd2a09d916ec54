"""A token for each row of logits in one pass over them, greedy or drawn. Of filters it knows what they leave.

The reference is `Sampler.draw` over `gumbel_noise`: the same hashes, bit for bit, so the same row gets the same token
in any batch. What torch does in twenty passes over [rows, vocab] float32 is one read of the logits here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton_runs import launches_early
from minisgl.sampling.args import BatchSamplingArgs

_BLOCK = 2048


def sample_rows(logits: Tensor, args: BatchSamplingArgs, floors: Tensor | None = None) -> Tensor:
    """logits: [rows, vocab]; args, whose filters are not looked at; floors: float32 [rows], see `lowest_logits`.
    Returns int32 [rows]: argmax of logits / temperature + noise over logits that are not below the row's floor, or of
    the logits for rows that are greedy. The first of equals."""
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    _launch(logits, args, floors, 0, tokens)
    return tokens


def best_keys(logits: Tensor, args: BatchSamplingArgs, first: int) -> Tensor:
    """As `sample_rows`, of all columns from token `first` on. Returns `vocab_parallel.sort_keys`, int64 [rows]."""
    keys = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _launch(logits, args, None, first, keys)
    return keys


def _launch(logits: Tensor, args: BatchSamplingArgs, floors: Tensor | None, first: int, out: Tensor) -> None:
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _BLOCK)
    best = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    index = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    draws, pdl = args.temperatures is not None, launches_early(logits.device)
    unused = index
    _best_of_block[(rows, parts)](
        logits, best, index,
        args.temperatures if draws else unused, args.seeds if draws else unused, args.positions if draws else unused,
        args.greedy.view(torch.int8) if args.greedy is not None else unused, unused if floors is None else floors,
        vocab, logits.stride(0), first, draws, args.greedy is not None, floors is not None, _BLOCK, pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    keys = out.dtype == torch.int64
    _best_of_row[(rows,)](best, index, out, parts, keys, triton.next_power_of_2(parts), pdl, launch_pdl=pdl)


@triton.jit
def _best_of_block(
    logits, best, index, temperatures, seeds, positions, greedy, floors, vocab, stride, first,
    DRAW: tl.constexpr, MIXED: tl.constexpr, FLOOR: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if FLOOR:
        score = tl.where(score < tl.load(floors + row), float("-inf"), score)
    any_left = tl.max(score, axis=0) > float("-inf") if FLOOR else True  # a block that has none needs no noise
    if DRAW and any_left:
        warm = score * (1 / tl.load(temperatures + row))
        warm += _gumbel(tl.load(seeds + row).to(tl.int64), tl.load(positions + row).to(tl.int64), first + token, PDL)
        score = tl.where(tl.load(greedy + row) != 0, score, warm) if MIXED else warm
    value, where = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    parts = tl.num_programs(1)
    tl.store(best + row * parts + part, value)
    tl.store(index + row * parts + part, first + part * BLOCK + where)


@triton.jit
def _best_of_row(best, index, out, parts, KEYS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    score = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    value, where = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(index + row * parts + where)
    if KEYS:
        bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        tl.store(out + row, (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64)))
    else:
        tl.store(out + row, token)


@triton.jit
def _gumbel(seed, position, token, GPU: tl.constexpr):
    """`noise.gumbel_noise` of one row: seed, position int64 scalars; token int32 [n]. float32 [n]."""
    key = _mix64(_mix64(seed) + position * (0x9E3779B97F4A7C15 - 0x10000000000000000))
    step, start = ((key >> 32) | 1).to(tl.int32), key.to(tl.int32)
    x = (token * step + start).to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    half = (x & 0x7FFFFFFF).to(tl.int32, bitcast=True).to(tl.float32)
    uniform = tl.minimum((half + 0.5) * 4.656612873077393e-10, 0.99999994)
    # -log1p(-u): by its series where u is small, since 1 - u would round away what the largest noise is made of.
    series = uniform * (1 + uniform * (0.5 + uniform * (1 / 3 + uniform * (0.25 + uniform * 0.2))))
    exponential = tl.where(uniform < 0.03, series, -_log(1 - uniform, GPU))
    return -_log(exponential, GPU)


@triton.jit
def _log(x, GPU: tl.constexpr):
    """Within 3e-7 + 3e-7 |log x|: the GPU's own log2, an eighth of the work of the exact one."""
    if GPU:
        log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return log2 * 0.6931471805599453
    return tl.log(x)


@triton.jit
def _mix64(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - 0x10000000000000000)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - 0x10000000000000000)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
