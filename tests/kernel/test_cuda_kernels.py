"""The copies of rows in CUDA C++ and in Triton against torch, on a GPU: sizes, refusals, graphs, chains of early
launches. With TRITON_INTERPRET=1 (and NumPy below 2.4) the sizes of Triton's run anywhere."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel import jit, rows
from minisgl.kernel.device import zeros

ON_GPU = torch.cuda.is_available()
if not ON_GPU and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = [pytest.mark.gpu] if ON_GPU else []

DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
FORMS = ("cuda", "triton")
on_gpu = pytest.mark.gpu


def form_named(name: str) -> Any:
    if name == "triton":
        return pytest.importorskip("minisgl.kernel.triton_rows")
    if not ON_GPU:
        pytest.skip("needs a GPU")
    try:
        jit.require_tvm_ffi()
    except jit.CannotCompile as error:
        pytest.skip(str(error))
    return rows.row_kernels(DEVICE)["cuda"]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Any:
    return form_named(request.param)


@pytest.fixture
def cuda() -> Any:
    return form_named("cuda")


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


SHAPES = [(8, 128, torch.bfloat16), (4, 128, torch.bfloat16), (3, 64, torch.float32), (2, 20, torch.bfloat16)]


@pytest.mark.parametrize(("heads", "dim", "dtype"), SHAPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_store(form: Any, heads: int, dim: int, dtype: torch.dtype, index: torch.dtype) -> None:
    """K and V as they come: parts of the qkv projection's rows. Slots that are not named stay as they are."""
    torch.manual_seed(0)
    for tokens in (0, 1, 5, 1000):
        k, v = random(tokens, 7 * heads, dim, dtype=dtype).split((5 * heads, heads, heads), dim=1)[1:]
        cache = random(2, 1500, heads, dim, dtype=dtype)
        expected, out_loc = cache.clone(), torch.randperm(1500, device=DEVICE)[:tokens].to(index)
        rows.store_rows(k, v, expected[0], expected[1], out_loc.long())
        form.store_rows(k, v, cache[0], cache[1], out_loc)
        assert torch.equal(cache, expected), f"{tokens} tokens"


def test_slots_of_a_pool_of_more_elements_than_int32_counts(form: Any) -> None:
    """An offset that wrapped around would write to the half before the pool."""
    pool, row = (
        zeros((2**32 + 32,), torch.float16, DEVICE)[2**31 :].view(-1, 1, 16),
        random(1, 1, 16, dtype=torch.float16),
    )
    form.store_rows(row, row, pool[:-1], pool[1:], torch.tensor([2**31 // 16], dtype=torch.int32, device=DEVICE))
    assert torch.equal(pool[-2:], torch.cat((row, row)))


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(1024, torch.bfloat16), (4096, torch.bfloat16), (576, torch.float32), (36, torch.bfloat16), (5, torch.uint8)],
)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_gather(form: Any, width: int, dtype: torch.dtype, index: torch.dtype) -> None:
    """A rank's shard of a vocabulary: ids before it, in it and after it."""
    torch.manual_seed(0)
    table = random(300, width, dtype=torch.float32).mul(50).to(dtype)
    for count in (1, 3, 700):
        ids = torch.randint(0, 1000, (count,), device=DEVICE, dtype=index)
        ids[0], ids[-1] = 299 + 400, 400
        for first in (0, 400):
            assert torch.equal(form.gather_rows(table, ids, first), rows.gather_rows(table, ids, first))


def test_no_rows(form: Any) -> None:
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert form.gather_rows(random(3, 8, dtype=torch.float32), none, 0).shape == (0, 8)


def test_what_does_not_fit_is_refused(cuda: Any) -> None:
    """Before anything is launched: the cache is as it was."""
    k, v = random(2, 5, 8, 128, dtype=torch.bfloat16)
    cache = torch.zeros(2, 30, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    out_loc = torch.arange(5, dtype=torch.int32, device=DEVICE)
    for wrong, says in [
        ((k, v[:4], *cache, out_loc), "v: size 0 (tokens) is 4, and k has 5"),
        ((k, v.half(), *cache, out_loc), "v: dtype is float16, and k has bfloat16"),
        ((k, v, *cache[:, :, :4], out_loc), "k_cache: size 1 (heads) is 4, and k has 8"),
        ((k, v, *cache, out_loc[:3]), "out_loc: size 0 (tokens) is 3, and k has 5"),
        ((k, v, *cache, out_loc.float()), "out_loc: out_loc's dtype is float32, not int32 or int64"),
        ((k, v, *cache, out_loc.cpu()), "out_loc is on cpu, not on cuda:0"),
    ]:
        with pytest.raises(ValueError, match=rf"^store\.cu:\d+: {re.escape(says)}$"):
            cuda.store_rows(*wrong)
    odd = random(6, 8 * 128 + 1, dtype=torch.bfloat16).flatten()[1 : 1 + 5 * 1024].view(5, 8, 128)
    with pytest.raises(ValueError, match=r"store\.cu:\d+: rows .* do not begin at multiples of the bytes"):
        cuda.store_rows(odd, v, *cache, out_loc)
    torch.cuda.synchronize()
    assert not cache.any()


@on_gpu
def test_on_the_callers_stream(form: Any) -> None:
    """A stream that is busy for a while: what it copies is what is there afterwards."""
    table, side = random(50, 1024, dtype=torch.bfloat16), torch.cuda.Stream()
    ids = torch.zeros(20, dtype=torch.int32, device=DEVICE)
    form.gather_rows(table, ids, 0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        ids.fill_(7)
        out = form.gather_rows(table, ids, 0)
    side.synchronize()
    assert torch.equal(out, table[7].expand(20, -1))


@on_gpu
def test_in_a_graph(form: Any) -> None:
    torch.manual_seed(0)
    table, ids = random(50, 1024, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    cache, slots = torch.zeros(2, 30, 8, 128, dtype=torch.bfloat16, device=DEVICE), torch.arange(4, device=DEVICE).int()

    def step() -> None:
        row = form.gather_rows(table, ids, 0).view(4, 8, 128)
        form.store_rows(row, row, cache[0], cache[1], slots)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        ids.copy_(torch.randint(0, 50, (4,)))
        slots.copy_(torch.randperm(30)[:4])
        cache.zero_()
        graph.replay()
        assert torch.equal(cache[1, slots.long()].view(4, -1), table[ids.long()])
        assert int(cache.any(-1).any(-1).sum()) == 2 * 4


@on_gpu
@pytest.mark.parametrize("other", FORMS)
@pytest.mark.parametrize("width", [1, 512])
def test_chains_of_early_launches_stay_in_order(form: Any, other: str, width: int) -> None:
    """Each gather's ids are what was stored from the one before it. A kernel that read too early, or wrote while
    another still read, would have gone elsewhere after 300 steps."""
    torch.manual_seed(0)
    size, count, second = 4000, 600, form_named(other)
    order = torch.randperm(size, device=DEVICE)
    table = order[:, None].expand(-1, width).int().contiguous()  # row i says where to go on
    start, slots = torch.randint(0, size, (count,), device=DEVICE).int(), torch.arange(count, device=DEVICE).int()
    cache, unused = torch.empty(2, count, width, 1, dtype=torch.int32, device=DEVICE)

    def chain() -> Tensor:
        here = start
        for i in range(300):
            fetched = (form if i % 2 else second).gather_rows(table, here, 0).view(count, width, 1)
            (form if i % 3 else second).store_rows(fetched, fetched, cache, unused, slots)
            here = cache.view(-1)[:count] if width == 1 else cache[:, i % width, 0].contiguous()
        return here.clone()

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    expected = start.long()
    for _ in range(300):
        expected = order[expected]
    for _ in range(5):
        cache.zero_()
        graph.replay()
        assert torch.equal(out.long(), expected)
