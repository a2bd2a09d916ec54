"""`--attn fa` on a GPU, with whichever of the real packages is installed."""

from __future__ import annotations

import pytest
import torch
from paged_scene import PagedScene

from minisgl.attention import create_attention
from minisgl.attention.fa import flash_attention
from minisgl.attention.hybrid import HybridAttention
from minisgl.attention.shape import Shape
from minisgl.core.batch import Batch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
HEADS = [(16, 8, 128), (32, 8, 128), (9, 3, 64)]
MIXED = [(99, 100), (16, 17), (0, 1), (0, 170), (48, 53), (100, 161)]


def fa(q_heads: int, kv_heads: int, head_dim: int, page_size: int) -> tuple[Shape, HybridAttention]:
    shape = Shape(q_heads, kv_heads, head_dim, page_size, torch.bfloat16, DEVICE)
    try:
        flash_attention(shape)
    except ValueError as error:
        pytest.skip(str(error))
    attention = create_attention("fa", *shape)
    assert isinstance(attention, HybridAttention)
    return shape, attention


@pytest.mark.parametrize("page_size", [4, 16, 64, 128, 256])
@pytest.mark.parametrize("heads", HEADS)
def test_against_float64(heads: tuple[int, int, int], page_size: int) -> None:
    torch.manual_seed(0)
    shape, attention = fa(*heads, page_size)
    for lengths, num_decode in (
        ([(n - 1, n) for n in (1, 700, 33, 64, 65, 5, 128, 129)], 8),
        ([(0, 1), (0, 30), (64, 70), (3, 20)], 0),  # so few that 4 has a kernel for them
        ([(0, 300), (0, 128), (64, 64 + 129)], 0),
        (MIXED, 3),
    ):
        scene = PagedScene(lengths, num_decode, shape)
        error = scene.error(attention, attention.prepare_metadata(scene.batch, scene.table))
        assert error < 8e-3, f"{lengths}: {error}"


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_recorded_decode(heads: tuple[int, int, int], page_size: int) -> None:
    """In one CUDA graph, long rows before short ones: nothing of the earlier step is read."""
    torch.manual_seed(0)
    shape, attention = fa(*heads, page_size)
    q = torch.randn(4, shape.q_heads, shape.head_dim).to(DEVICE, torch.bfloat16)
    scene = PagedScene([(1499, 1500), (89, 90), (3, 4), (33, 34)], 4, shape)
    attention.init_capture_graph(4, scene.table)
    recorded = attention.prepare_for_capture(Batch([scene.dummy] * 4, num_decode=4)).decode
    attention.decode.attend(q, 0, scene.pool, recorded)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention.decode.attend(q, 0, scene.pool, recorded)
    for rows in ([0, 1, 2], [2], [3, 0, 1, 2], [1, 3]):
        batch = Batch([scene.batch.reqs[row] for row in rows], num_decode=len(rows))
        batch.padded_reqs = batch.reqs + [scene.dummy] * (4 - len(rows))
        batch.attn_metadata = attention.prepare_metadata(batch, scene.table)
        attention.prepare_for_replay(batch)
        graph.replay()
        eager = attention.decode.attend(q, 0, scene.pool, batch.attn_metadata.decode)
        torch.testing.assert_close(found, eager, atol=1e-2, rtol=1e-2)
