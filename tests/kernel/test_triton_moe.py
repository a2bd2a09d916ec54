"""The kernels of experts against the loop in plain torch: compiled on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 (and NumPy below 2.4)", allow_module_level=True)

from minisgl.attention.recompute import RecomputeAttention
from minisgl.core.context import Context
from minisgl.core.protocols import NoCommunicator
from minisgl.kernel import triton_moe_tiles as tiles_table
from minisgl.kernel.triton_moe import group, route, run_experts
from minisgl.kernel.triton_moe_tiles import Product, Tiles, choose_tiles, default_tiles, measured
from minisgl.models import fuse
from minisgl.models.config import ModelConfig
from minisgl.models.registry import create_model
from minisgl.models.weights import allocate
from minisgl.moe import choose as chooser
from minisgl.moe.choose import by_kernels
from minisgl.moe.layer import Experts, MoELayer, waits_for_host

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 6e-3}  # of the whole tensor
DTYPES = list(TOLERANCE) if ON_GPU else [torch.float32, torch.float16]  # the interpreter's tl.dot has no bfloat16
TUNED = (0.5, 16), (4, 32), (100, 128)  # rows an expert at most, rows of a tile
HIDDEN, SIZE = 96, 40  # neither divides by what a program takes at once


class Rank:
    """One of several: what it computes is a term of the sum, and nobody adds it up."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def config(experts: int, top_k: int, hidden: int = HIDDEN, size: int = SIZE) -> ModelConfig:
    keys = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 10, "hidden_size": hidden, "intermediate_size": 1}
    keys |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 8}
    keys |= {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": size}
    return ModelConfig.from_dict({**keys, "norm_topk_prob": True})


def make_layer(model: ModelConfig, dtype: torch.dtype, comm: Any = NoCommunicator) -> MoELayer:
    layer = MoELayer(model, comm() if comm is NoCommunicator else comm).to(DEVICE)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return layer.to(dtype).requires_grad_(False)


def choose(tokens: int, experts: int, top_k: int, of: int | None = None) -> tuple[Tensor, Tensor]:
    """Weights and ids as `route` gives them; `of`: how many of the experts there are to choose from."""
    scores = torch.rand(tokens, of or experts, device=DEVICE)
    weights, ids = scores.topk(top_k, dim=1)
    places = torch.randperm(experts, device=DEVICE)
    return weights.contiguous(), places[ids].int()


def exact(experts: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The reference in float64."""
    return experts.double()(x.double(), weights.double(), ids.long())


def distance(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (5, 5), (8, 2), (60, 3), (128, 8)])
def test_route(experts: int, top_k: int, normalise: bool, dtype: torch.dtype) -> None:
    layer = make_layer(config(experts, top_k), torch.float32)
    layer.norm_topk_prob = normalise
    logits = torch.stack([torch.randperm(experts, device=DEVICE) for _ in range(7)]).to(dtype) / 8  # no two are equal
    layer.gate.forward = lambda x: x  # type: ignore[method-assign]
    expected, expected_ids = layer.route(logits.float())
    weights, ids = route(logits, top_k, normalise)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


def test_of_equal_experts_the_first_are_chosen() -> None:
    logits = torch.zeros(2, 9, device=DEVICE)
    logits[1, [3, 8]] = 1.0
    assert route(logits, 3, True)[1].tolist() == [[0, 1, 2], [3, 8, 0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_chooses_nothing_that_is_not_there(value: float) -> None:
    logits = torch.full((3, 5), value, device=DEVICE)
    logits[1] = torch.arange(5)
    logits[1, 2] = value
    _, ids = route(logits, 3, True)
    assert ids.min() >= 0
    assert ids.max() < 5


def check_groups(ids: Tensor, experts: int, rows: int) -> None:
    """Each pair is in one tile, with its expert; an expert's are as they came, in as few tiles as can be."""
    order, table = (part.tolist() for part in group(ids, experts, rows))
    chosen = ids.flatten().tolist()
    assert order == sorted(range(len(chosen)), key=lambda pair: (chosen[pair], pair))
    seen, tiles = [], [0] * experts
    for expert, first, count in table:
        assert 0 <= count <= rows
        if count:
            assert 0 <= expert < experts
            tiles[expert] += 1
            seen += range(first, first + count)
            assert {chosen[pair] for pair in order[first : first + count]} == {expert}
    assert sorted(seen) == list(range(len(chosen)))
    assert tiles == [-(-chosen.count(expert) // rows) for expert in range(experts)]


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 300])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (8, 2), (128, 8)])
def test_groups(tokens: int, experts: int, top_k: int, rows: int) -> None:
    check_groups(choose(tokens, experts, top_k)[1], experts, rows)


def test_the_chapters_groups() -> None:
    """Those of chapters/stage6_tensor_parallel/experts.md."""
    ids = torch.tensor([[0, 2], [2, 1], [0, 2]], dtype=torch.int32, device=DEVICE)
    order, table = group(ids, 4, 4)
    assert order.tolist() == [0, 4, 3, 1, 2, 5]
    assert table.tolist() == [[0, 0, 2], [1, 2, 1], [2, 3, 3], [2, 7, 0], [3, 6, 0]]


@pytest.mark.parametrize("expert", [0, 3, 7])
@pytest.mark.parametrize("tokens", [5, 64, 2500])  # the last are more than are read at once
def test_groups_when_all_choose_the_same(tokens: int, expert: int) -> None:
    check_groups(torch.full((tokens, 1), expert, dtype=torch.int32, device=DEVICE), 8, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 4, 1), (1, 8, 2), (1, 128, 8), (2, 4, 2), (7, 8, 1), (7, 128, 8), (64, 8, 2), (300, 4, 2)],
)
def test_experts(tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
    layer = make_layer(config(experts, top_k), dtype).experts
    x, (weights, ids) = torch.randn(tokens, HIDDEN, device=DEVICE).to(dtype), choose(tokens, experts, top_k)
    out = run_experts(x, layer.gate_up_proj, layer.down_proj, weights, ids)
    assert out.dtype == dtype
    assert distance(out, exact(layer, x, weights, ids)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("hidden", "size"), [(64, 128), (1100, 24)])
@pytest.mark.parametrize("tokens", [1, 20])
def test_sizes(tokens: int, hidden: int, size: int) -> None:
    layer = make_layer(config(6, 2, hidden, size), torch.float32).experts
    x, (weights, ids) = torch.randn(tokens, hidden, device=DEVICE), choose(tokens, 6, 2)
    out = run_experts(x, layer.gate_up_proj, layer.down_proj, weights, ids)
    assert distance(out, exact(layer, x, weights, ids)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("tokens", [1, 2, 70])
@pytest.mark.parametrize("of", [1, 3])
def test_experts_nobody_chose_are_not_read(tokens: int, of: int) -> None:
    """All tokens on one expert or on three; the others must not cost anything: they may hold anything."""
    layer = make_layer(config(8, 1), torch.float32).experts
    x, (weights, ids) = torch.randn(tokens, HIDDEN, device=DEVICE), choose(tokens, 8, 1, of)
    for expert in set(range(8)) - set(ids.flatten().tolist()):
        layer.gate_up_proj[expert] = torch.nan
        layer.down_proj[expert] = torch.nan
    out = run_experts(x, layer.gate_up_proj, layer.down_proj, weights, ids)
    assert distance(out, exact(layer, x, weights, ids)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_token_does_not_depend_on_its_batch(tokens: int) -> None:
    layer = make_layer(config(8, 2), torch.float32).experts
    x, (weights, ids) = torch.randn(40, HIDDEN, device=DEVICE), choose(40, 8, 2)
    whole = run_experts(x, layer.gate_up_proj, layer.down_proj, weights, ids)
    part = run_experts(x[:tokens], layer.gate_up_proj, layer.down_proj, weights[:tokens], ids[:tokens])
    assert distance(part, whole[:tokens]) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("tokens", [1, 12])
def test_ranks_compute_the_whole(tokens: int) -> None:
    """40 columns on three ranks are 14, 13 and 13."""
    model = config(8, 2)
    whole, x = make_layer(model, torch.float32), torch.randn(tokens, HIDDEN, device=DEVICE)
    total, start = torch.zeros_like(x), 0
    for rank in range(3):
        layer = make_layer(model, torch.float32, Rank(rank, 3))
        stop = start + layer.experts.down_proj.shape[2]
        layer.gate.weight.copy_(whole.gate.weight)
        gate, up = whole.experts.gate_up_proj.chunk(2, dim=1)
        layer.experts.gate_up_proj.copy_(torch.cat((gate[:, start:stop], up[:, start:stop]), dim=1))
        layer.experts.down_proj.copy_(whole.experts.down_proj[:, :, start:stop])
        total += by_kernels(layer, x)
        start = stop
    assert start == SIZE
    torch.testing.assert_close(total, whole(x), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_fused_model_is_the_model(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And waits for the host no more."""
    for module in (fuse, chooser):
        monkeypatch.setattr(module, "triton_runs", lambda device: True)
    layers = dataclasses.replace(config(8, 2), num_layers=2)
    model = create_model(layers, NoCommunicator(), 16, torch.float32, DEVICE)
    allocate(model, torch.float32, DEVICE)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    ids = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    context = Context(ids, ids.long(), None, RecomputeAttention())
    expected, waited = model(context), waits_for_host(model)
    assert fuse.fuse(model, context.attention, DEVICE)
    chooser.choose_experts(model, "triton", DEVICE)
    assert (waited, waits_for_host(model)) == (True, False)
    assert distance(model(context), expected) < 1e-5


def test_a_model_without_experts_does_not_wait() -> None:
    assert not waits_for_host(torch.nn.Linear(1, 1))


def test_what_was_measured_is_used_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of what was measured the entry for as many rows an expert, or the last; nothing on another GPU."""
    products = [[64, 128, 4, 4, 1], [32, 64, 8, 3, 8]]
    entries = [{"most": most, "rows": rows, "gate_up": products[0], "down": products[1]} for most, rows in TUNED]
    monkeypatch.setattr(tiles_table, "TABLE", tmp_path / "tiles.json")
    tiles_table.TABLE.write_text(json.dumps({"a GPU of a test": entries}))
    monkeypatch.setattr(tiles_table, "_name", lambda device: "a GPU of a test")

    def rows(pairs: int, dtype: torch.dtype = torch.bfloat16) -> Tiles:
        return choose_tiles(pairs, 8, dtype, DEVICE)

    both = [Product(*product) for product in products]
    assert rows(1) == rows(4) == Tiles(16, *both)
    assert rows(5) == rows(32) == Tiles(32, *both)
    assert rows(33) == rows(2**20, torch.float16) == Tiles(128, *both)
    assert rows(4, torch.float32) == default_tiles(4, 8, torch.float32)
    monkeypatch.setattr(tiles_table, "_name", lambda device: "another GPU of a test")
    assert rows(4) == default_tiles(4, 8, torch.bfloat16)


def test_what_is_committed_can_be_launched() -> None:
    for name in json.loads(tiles_table.TABLE.read_text()):
        entries = measured(name)
        assert [most for most, _ in entries] == sorted(most for most, _ in entries)
        for _, tiles in entries:
            powers = tiles.rows, *(n for part in tiles[1:] for n in part[:3])
            assert all(n & (n - 1) == 0 for n in powers), tiles
            assert min(tiles.rows, *(n for part in tiles[1:] for n in part[:2])) >= 16, tiles


class TestOnAGpu:
    """In the shapes of Qwen3-30B-A3B, against float32."""

    pytestmark = pytest.mark.gpu

    @pytest.fixture(scope="class")
    def layer(self) -> MoELayer:
        return make_layer(config(128, 8, 2048, 768), torch.bfloat16)

    @pytest.mark.parametrize("tokens", [1, 2, 5, 16, 64, 256, 1000, 5000])
    def test_bfloat16(self, layer: MoELayer, tokens: int) -> None:
        x = torch.randn(tokens, 2048, device=DEVICE, dtype=torch.bfloat16)
        weights, ids = route(layer.gate(x), 8, True)
        experts = layer.experts
        out = run_experts(x, experts.gate_up_proj, experts.down_proj, weights, ids)
        expected = torch.zeros(tokens, 2048, device=DEVICE)
        for expert in ids.unique().tolist():
            token, choice = (ids == expert).nonzero(as_tuple=True)
            gated = experts.gate(x[token].float() @ experts.gate_up_proj[expert].float().T)
            answer = gated @ experts.down_proj[expert].float().T
            expected.index_add_(0, token, answer * weights[token, choice, None])
        assert distance(out, expected) <= TOLERANCE[torch.bfloat16]

    @pytest.mark.parametrize("tokens", [1, 3, 64, 600])
    def test_a_graph_repeats_it_with_other_choices(self, layer: MoELayer, tokens: int) -> None:
        """Nothing that the host knew at the recording may depend on what was chosen."""
        x = torch.randn(tokens, 2048, device=DEVICE, dtype=torch.bfloat16)
        by_kernels(layer, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = by_kernels(layer, x)
        same = torch.randn(1, 2048, device=DEVICE, dtype=torch.bfloat16).expand(tokens, -1)
        for given in (torch.randn_like(x), same, torch.randn_like(x)):
            x.copy_(given)
            graph.replay()
            assert torch.equal(out, by_kernels(layer, given.contiguous()))
