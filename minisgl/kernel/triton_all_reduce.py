"""The sum of what a few GPUs have, in one kernel on each: they write, meet, and read each other. Knows no processes.

Every GPU has a buffer that all can read (torch's symmetric memory), of two halves and some flags. A call copies its
terms into one half, tells the others' flags, waits for their word in its own, and adds up, in the order of the ranks.
The next call takes the other half: who is in it has left the one before, so nobody waits a second time at the end.
Programs that have nothing to add up meet nobody: fewer flags cross. Their turn passes all the same.
Whose turn it is, the device counts, for a CUDA graph repeats its calls as they were recorded. After the one-shot
all-reduce of vLLM and TensorRT-LLM; torch's own has 24 programs, and meets twice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton_runs import launches_early

PROGRAMS = 132  # always: each has a flag of each GPU, and all must be running at once
_LEAST, _MOST = 512, 4096  # values that a program takes at a time


def flag_bytes(size: int) -> int:
    """Of the flags of `size` GPUs, at the end of each one's buffer, zero at first."""
    return PROGRAMS * size * 4


def one_shot_sum(x: Tensor, peers: Tensor, turns: Tensor, half: int, rank: int) -> Tensor:
    """Adds up x of all GPUs, in place. All call it with as many values, one call after another.

    x: contiguous, at most `half` bytes. peers: int64 [size], the addresses of the buffers, each of 2 * half bytes and
    the flags. turns: int32 [PROGRAMS], this GPU's own, zero at first.
    """
    count, pdl = x.numel(), launches_early(x.device)
    block = min(max(triton.next_power_of_2(triton.cdiv(count, PROGRAMS)), _LEAST), _MOST)
    values, warps = half // x.itemsize, 4 if block <= 1024 else 16
    _one_shot[(PROGRAMS,)](
        x, peers, turns, count, values, half // 2, rank, len(peers), block, pdl, num_warps=warps, launch_pdl=pdl
    )
    return x


@triton.jit
def _one_shot(
    x, peers, turns, count, half, flags_at,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """half: in values. flags_at: in int32, from the start of a buffer."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK
    turn = tl.load(turns + program) + 1
    if program * BLOCK < count:
        place = (turn & 1) * half
        mine = _buffer(peers, RANK, x.dtype) + place
        for start in range(program * BLOCK, count, step):
            i = start + tl.arange(0, BLOCK)
            tl.store(mine + i, tl.load(x + i, mask=i < count), mask=i < count)
        tl.debug_barrier()  # all of the program has written before its flag says so
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                flag = _buffer(peers, peer, tl.pointer_type(tl.int32)) + flags_at + program * SIZE + RANK
                tl.atomic_xchg(flag, turn, sem="release", scope="sys")
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                flag = _buffer(peers, RANK, tl.pointer_type(tl.int32)) + flags_at + program * SIZE + peer
                while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - turn < 0:  # it may be a turn ahead
                    pass
        tl.debug_barrier()
        for start in range(program * BLOCK, count, step):
            i = start + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for peer in tl.static_range(SIZE):
                theirs = _buffer(peers, peer, x.dtype) + place
                total += tl.load(theirs + i, mask=i < count).to(tl.float32)
            tl.store(x + i, total.to(x.dtype.element_ty), mask=i < count)
    tl.store(turns + program, turn)


@triton.jit
def _buffer(peers, peer: tl.constexpr, pointer: tl.constexpr):
    return tl.multiple_of(tl.load(peers + peer).to(pointer), 16)
