"""The one-shot sum in Triton's interpreter: "GPUs" are processes that share their buffers. On GPUs: test_two_gpus."""

from __future__ import annotations

import os
import time

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available() or "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs TRITON_INTERPRET=1 (and NumPy below 2.4) on a machine without a GPU", allow_module_level=True)

from minisgl.kernel import triton_all_reduce

HALF = 1 << 17  # bytes
STEPS = [
    (5, torch.float32),
    (4096, torch.bfloat16),
    (30000, torch.float32),
    (700, torch.bfloat16),
    (8192, torch.float16),
]


def terms(step: int, rank: int) -> torch.Tensor:
    """Of which three have a sum that bfloat16 has, too: the interpreter cuts off what must be rounded."""
    count, dtype = STEPS[step % len(STEPS)]
    return ((torch.arange(count) % 40) * (rank + 1) + step % 4).to(dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_calls_that_follow_each_other(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other lengths and dtypes each time, so that other programs have the same bytes; two turns share a half."""
    monkeypatch.setattr(triton_all_reduce, "PROGRAMS", 4)
    num_bytes = 2 * HALF + triton_all_reduce.flag_bytes(size)
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(size)]
    peers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    wrong = torch.full((size,), -1).share_memory_()
    children = []
    for rank in range(size):
        if (pid := os.fork()) == 0:  # shared memory stays at its address
            wrong[rank] = mismatches(rank, size, peers)
            os._exit(0)
        children.append(pid)
    deadline = time.monotonic() + 100
    while children and time.monotonic() < deadline:
        children = [pid for pid in children if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    for pid in children:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert wrong.tolist() == [0] * size, "-1: a rank waits for ever, or has failed"


def mismatches(rank: int, size: int, peers: torch.Tensor) -> int:
    turns = torch.zeros(triton_all_reduce.PROGRAMS, dtype=torch.int32)
    found = 0
    for step in range(3 * len(STEPS)):
        x = terms(step, rank)
        triton_all_reduce.one_shot_sum(x, peers, turns, HALF, rank)
        found += int((x != sum(terms(step, other).float() for other in range(size)).to(x.dtype)).sum())
    return found
