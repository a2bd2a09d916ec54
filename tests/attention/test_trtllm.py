"""`--attn trtllm` on a GPU, with the real package: Hopper's decode kernel and FlashInfer's prompts."""

from __future__ import annotations

import logging

import pytest
import torch
from paged_scene import PagedScene

from minisgl.attention import create_attention
from minisgl.attention.shape import Shape

pytestmark = pytest.mark.gpu
pytest.importorskip("flashinfer")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a GPU of compute capability 9", allow_module_level=True)

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(16, 8), (32, 8)])
def test_against_float64(q_heads: int, kv_heads: int, page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    shape = Shape(q_heads, kv_heads, 128, page_size, torch.bfloat16, DEVICE)
    with caplog.at_level(logging.INFO, "minisgl"):
        attention = create_attention("trtllm", *shape)
    said = [record.getMessage() for record in caplog.records]
    assert "attention: TensorRT-LLM has no kernel for prompts on this GPU; FlashInfer's takes them" in said
    assert "decode by TensorRT-LLM xqa" in said[-1]
    for lengths, num_decode in (
        ([(n - 1, n) for n in (1, 700, 33, 64, 65, 5)], 6),
        ([(99, 100), (16, 17), (0, 1), (0, 70), (48, 53), (100, 161)], 3),
    ):
        scene = PagedScene(lengths, num_decode, shape)
        assert scene.error(attention, attention.prepare_metadata(scene.batch, scene.table)) < 8e-3
