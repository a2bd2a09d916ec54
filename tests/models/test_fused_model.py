"""Whole models with fast kernels in their layers' places, against the layers: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 (and NumPy below 2.4)", allow_module_level=True)

from minisgl.attention.hybrid import HybridAttention
from minisgl.attention.triton_attention import TritonDecode, TritonPrefill
from minisgl.core.batch import Batch
from minisgl.core.context import Context
from minisgl.core.protocols import NoCommunicator
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.layers.embedding import VocabParallelEmbedding
from minisgl.models import fuse
from minisgl.models.blocks import CausalLM
from minisgl.models.config import ModelConfig
from minisgl.models.registry import create_model
from minisgl.models.weights import allocate
from minisgl.stage3.page_pool import KVCachePool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 4
SHAPE = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}


def run(model: CausalLM, config: ModelConfig) -> list[Tensor]:
    """Logits of two prompts, then of the next tokens of both, then of one alone."""
    attention = HybridAttention(TritonPrefill(PAGE), TritonDecode(PAGE))
    sizes = config.num_kv_heads, config.head_dim, torch.float32, DEVICE
    pool = KVCachePool(config.num_layers, 5, PAGE, *sizes)
    table = torch.tensor([[2, 0], [4, 1]]).repeat_interleave(PAGE, 1) * PAGE + torch.arange(PAGE).repeat(2)
    table = table.int().to(DEVICE)
    ids = torch.arange(18, dtype=torch.int32).view(2, 9)
    reqs = [Req(row, ids[row, :n], SamplingParams(max_tokens=3), row) for row, n in enumerate((6, 3))]
    found = []
    for members, num_decode in ((reqs, 0), (reqs, 2), (reqs[:1], 1)):
        batch = Batch(members, num_decode)
        places = [(req.table_idx, at) for req in members for at in range(req.cached_len, req.device_len)]
        rows, positions = torch.tensor(places, device=DEVICE).T.contiguous()
        last = torch.tensor([req.extend_len for req in members], device=DEVICE).cumsum(0) - 1
        context = Context(
            ids.to(DEVICE)[rows, positions], positions, None if num_decode else last, attention,
            attention.prepare_metadata(batch, table), pool, table, table[rows, positions],
        )  # fmt: skip
        found.append(model(context))
        for req in members:
            req.complete_one()
    return found


@pytest.mark.parametrize(
    ("architecture", "halves"), [("LlamaForCausalLM", True), ("Qwen2ForCausalLM", False), ("Qwen3ForCausalLM", False)]
)
@torch.inference_mode()
def test_a_fused_model_is_the_model(architecture: str, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With halves: as many products as may be are made in two, whatever their sizes."""
    monkeypatch.setattr(fuse, "triton_runs", lambda device: True)
    monkeypatch.setattr("minisgl.attention.triton_attention.decode_splits", lambda *_: 2)  # 32 take long to interpret
    if halves:
        monkeypatch.setattr("minisgl.models.fuse_linear.ROWS_FOR_HALVES", range(2, 100))
        monkeypatch.setattr(fuse, "is_better_halved", lambda layer: layer.bias is None)
    config = ModelConfig.from_dict({"architectures": [architecture], **SHAPE, **HEADS})
    model = create_model(config, NoCommunicator(), 16, torch.float32, DEVICE)
    allocate(model, torch.float32, DEVICE)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    expected = run(model, config)
    assert fuse.fuse(model, HybridAttention(TritonPrefill(PAGE), TritonDecode(PAGE)), DEVICE)
    for logits, whole in zip(run(model, config), expected, strict=True):
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


class Doubling:
    """A rank beside another that has the same."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("rank", [0, 1])
@torch.inference_mode()
def test_an_embedding_of_a_rank(rank: int) -> None:
    comm: Any = Doubling(rank)
    layer = VocabParallelEmbedding(7, 20, comm).to(DEVICE)
    torch.nn.init.normal_(layer.weight)
    ids = torch.tensor([0, 3, 4, 6, 3], dtype=torch.int32, device=DEVICE)
    assert torch.equal(fuse._embed(layer, ids), layer(ids))
