"""The CUDA kernels' own code on a CPU, thread after thread (see emulated/cuda_runtime.h), against plain torch.

What only a GPU can show, streams, graphs and early launches, is in test_cuda_kernels.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel import cuda_rows, jit, rows

pytest.importorskip("tvm_ffi")
if shutil.which("c++") is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

EMULATED = Path(__file__).with_name("emulated")
Compile = Callable[[jit.Instance], Callable[..., Any]]


@pytest.fixture
def emulated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Compile:
    monkeypatch.setenv("CPATH", str(EMULATED))
    folder = tmp_path_factory.mktemp("kernels")
    return lambda made: jit.load(
        jit.Instance(str(EMULATED / Path(made.file).with_suffix(".cpp")), made.function, "cpu"), folder
    )


@pytest.mark.parametrize(("heads", "dim", "dtype"), [(17, 128, torch.float32), (3, 12, torch.bfloat16)])
def test_store(emulated: Compile, heads: int, dim: int, dtype: torch.dtype) -> None:
    """17 packets a lane, which are three rounds, the last not full; and a row of 72 bytes, 9 lanes of 8.
    K and V as they come, out of the qkv rows."""
    torch.manual_seed(0)
    size = dim * dtype.itemsize
    run = emulated(cuda_rows.store_instance(heads * size, size, "sm_90"))
    for tokens, index in ((0, torch.int32), (1, torch.int32), (5, torch.int64), (70, torch.int32)):
        k, v = torch.randn(tokens, 7 * heads, dim).to(dtype).split((5 * heads, heads, heads), dim=1)[1:]
        cache = torch.randn(2, 100, heads, dim).to(dtype)
        expected, out_loc = cache.clone(), torch.randperm(100)[:tokens].to(index)
        rows.store_rows(k, v, expected[0], expected[1], out_loc.long())
        run(k, v, cache[0], cache[1], out_loc)
        assert torch.equal(cache, expected), f"{tokens} tokens"
    with pytest.raises(ValueError, match=r"store\.cu:\d+: v: size 1 \(heads\) is 1, and k has"):
        run(k, v[:, :1], cache[0], cache[1], out_loc)


@pytest.mark.parametrize(
    ("width", "dtype"), [(1024, torch.bfloat16), (4224, torch.float32), (36, torch.bfloat16), (5, torch.uint8)]
)
def test_gather(emulated: Compile, width: int, dtype: torch.dtype) -> None:
    """4 parts; 8 parts, the last packets not of all lanes; 9 lanes; 5 lanes of a byte each."""
    torch.manual_seed(0)
    table = torch.randint(1, 200, (30, width)).to(dtype)
    run = emulated(cuda_rows.gather_instance(width * dtype.itemsize, "sm_90"))
    for count, index in ((0, torch.int32), (1, torch.int32), (70, torch.int64)):
        ids = torch.randint(0, 100, (count,), dtype=index)
        ids[:1], ids[-1:] = 29 + 40, 40
        for first in (0, 40):
            out = torch.full((count, width), 7).to(dtype)
            run(table, ids, first, out)
            assert torch.equal(out, rows.gather_rows(table, ids, first))


def test_refusals_of_a_gather(emulated: Compile) -> None:
    run = emulated(cuda_rows.gather_instance(64, "sm_90"))

    def refused(table: Tensor, ids: Tensor, out: Tensor, says: str) -> None:
        with pytest.raises(ValueError, match=rf"gather\.cu:\d+: {says}"):
            run(table, ids, 0, out)

    table, ids = torch.zeros(30, 16), torch.zeros(3).int()
    refused(table, ids, torch.zeros(4, 16), r"out: size 0 \(ids\) is 4, and ids has 3")
    refused(table[:, :8].contiguous(), ids, torch.zeros(3, 8), "rows of 32 bytes for a kernel of 64")
    refused(torch.zeros(30, 32)[:, ::2], ids, torch.zeros(3, 16), "table: stride 1 is 2, not 1")
    refused(torch.zeros(481)[1:].view(30, 16), ids, torch.zeros(3, 16), "rows of the table or of out do not begin")
