"""The fast paged backends against float64: on a GPU all of them, on a CPU ours in Triton's interpreter."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 (and NumPy below 2.4)", allow_module_level=True)

from minisgl.attention import create_attention, triton_kernels
from minisgl.attention.hybrid import HybridAttention
from minisgl.attention.shape import Shape
from minisgl.attention.step_rows import RecordedSteps
from minisgl.attention.triton_attention import TritonDecode, TritonPrefill
from minisgl.attention.triton_kernels import TILE
from minisgl.core.batch import Batch
from minisgl.core.context import Context
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.kernel.device import zeros
from minisgl.stage3.page_pool import KVCachePool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIXED = [(99, 100), (16, 17), (0, 1), (0, 70), (48, 53), (160, 161)]  # (cached_len, device_len)


def backend(name: str, shape: Shape) -> Any:
    if DEVICE.type == "cpu":
        steps = partial(RecordedSteps, page_size=shape.page_size, tile=TILE)
        return HybridAttention(TritonPrefill(shape.page_size), TritonDecode(shape.page_size), steps)
    return create_attention(name, *shape)


@dataclass
class Scene:
    """Requests whose pages lie anywhere in a pool; what belongs to nobody is `garbage`."""

    batch: Batch
    lengths: list[tuple[int, int]]
    table: Tensor
    pool: KVCachePool
    shape: Shape

    @classmethod
    def build(cls, lengths: list[tuple[int, int]], num_decode: int, shape: Shape, garbage: float) -> Scene:
        size = shape.page_size
        counts = [-(-device_len // size) for _, device_len in lengths]
        pages = torch.randperm(sum(counts) + 2).int()
        pool = KVCachePool(2, len(pages), size, shape.kv_heads, shape.head_dim, shape.dtype, shape.device)
        for layer_id in range(2):
            pool.k_cache(layer_id)[: pool.dummy_slot] = garbage
            pool.v_cache(layer_id)[: pool.dummy_slot] = garbage
        table = torch.full((len(lengths) + 1, (max(counts) + 1) * size), pool.dummy_slot, dtype=torch.int32)
        reqs = []
        for row, ((cached, device), count) in enumerate(zip(lengths, counts, strict=True)):
            own, pages = pages[:count], pages[count:]
            table[row, : count * size] = (own[:, None] * size + torch.arange(size)).flatten()
            slots = table[row, :cached].to(shape.device)
            for layer_id in range(2):
                for cache in (pool.k_cache(layer_id), pool.v_cache(layer_id)):
                    cache[slots] = torch.randn(cached, shape.kv_heads, shape.head_dim).to(cache)
            params = SamplingParams(max_tokens=8)
            reqs.append(Req(row, torch.zeros(device, dtype=torch.int32), params, row, cached_len=cached))
        return cls(Batch(reqs, num_decode), lengths, table.to(shape.device), pool, shape)

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        heads = torch.randn(self.batch.num_tokens, s.q_heads + 2 * s.kv_heads, s.head_dim).to(s.device, s.dtype)
        q, k, v = heads.split((s.q_heads, s.kv_heads, s.kv_heads), dim=1)
        return q.contiguous(), k, v

    def context(self, metadata: object) -> Context:
        reqs = self.batch.padded_reqs
        out_loc = torch.cat([self.table[req.table_idx, req.cached_len : req.device_len] for req in reqs])
        fields: dict[str, Any] = {"input_ids": out_loc, "positions": out_loc, "logits_rows": None, "attention": None}
        return Context(**fields, kv_cache=self.pool, out_loc=out_loc, attn_metadata=metadata)

    def expected(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """In float64, request by request."""
        outs, start = [], 0
        for req in self.batch.padded_reqs:
            slots = self.table[req.table_idx, : req.device_len].long()
            group = q.shape[1] // k_cache.shape[1]
            k, v = (x[slots].double().repeat_interleave(group, dim=1) for x in (k_cache, v_cache))
            own = q[start : start + req.extend_len].double()
            scores = torch.einsum("qhd,khd->hqk", own, k) * q.shape[2] ** -0.5
            future = torch.ones_like(scores[0], dtype=torch.bool).triu(req.cached_len + 1)
            outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v))
            start += req.extend_len
        return torch.cat(outs)

    def check(self, attention: Any, metadata: object) -> None:
        for layer_id in range(2):
            q, k, v = self.qkv()
            out = attention.forward(q, k, v, layer_id, self.context(metadata))
            assert out.shape == q.shape
            expected = self.expected(q, self.pool.k_cache(layer_id), self.pool.v_cache(layer_id))
            error = (out.double() - expected).norm() / expected.norm()
            assert error < (1e-5 if self.shape.dtype == torch.float32 else 8e-3), f"layer {layer_id}: {error}"


def shapes(page_size: int, dtype: torch.dtype) -> list[Shape]:
    heads = [(3, 1, 20)] if DEVICE.type == "cpu" else [(16, 8, 128), (32, 8, 128), (9, 3, 64), (6, 2, 20)]
    if dtype == torch.bfloat16:
        heads = [each for each in heads if each[2] >= 64]  # FlashInfer's
    return [Shape(*each, page_size, dtype, DEVICE) for each in heads]


CASES = [
    ("triton", torch.float32),  # the interpreter's bfloat16 products are wrong
    *(pytest.param(name, torch.bfloat16, marks=pytest.mark.gpu) for name in ("triton", "fi", "fi,triton")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("page_size", [4, 16, 64] if DEVICE.type == "cuda" else [4])
@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
def test_against_the_oracle(name: str, dtype: torch.dtype, page_size: int, kind: str) -> None:
    torch.manual_seed(0)
    lengths = {
        "decode": [(n - 1, n) for n in (1, 700 if DEVICE.type == "cuda" else 150, 33, 64, 65, 5)],
        "prefill": [(0, 1), (0, 130), (64, 70), (64, 64 + 65)],
        "mixed": MIXED,
    }[kind]
    garbage = torch.nan if name == "triton" else 100.0  # FlashInfer may read what it weighs with zero
    for shape in shapes(page_size, dtype):
        scene = Scene.build(lengths, {"decode": len(lengths), "prefill": 0, "mixed": 3}[kind], shape, garbage)
        attention = backend(name, shape)
        scene.check(attention, attention.prepare_metadata(scene.batch, scene.table))


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_any_number_of_parts(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("minisgl.attention.triton_attention.decode_splits", lambda *_: splits)
    shape = Shape(4, 2, 16, 16, torch.float32, DEVICE)
    scene = Scene.build([(n - 1, n) for n in (1, 100, 33)], 3, shape, torch.nan)
    attention = backend("triton", shape)
    scene.check(attention, attention.prepare_metadata(scene.batch, scene.table))


@pytest.mark.parametrize("splits", [1, 8])
def test_a_row_without_a_token_is_0(splits: int) -> None:
    from minisgl.attention.triton_kernels import decode

    q, cache = torch.randn(2, 4, 16, device=DEVICE), torch.randn(8, 2, 16, device=DEVICE)
    pages, lengths = torch.tensor([[0], [-1]], device=DEVICE).int(), torch.tensor([3, 0], device=DEVICE).int()
    both = decode(q, cache, cache, pages, lengths, torch.arange(2, device=DEVICE).int(), 8, splits)
    one = decode(q[:1], cache, cache, pages, lengths, torch.zeros(1, device=DEVICE).int(), 8, splits)
    torch.testing.assert_close(both, torch.cat((one, torch.zeros_like(one))))


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_a_pool_of_more_elements_than_int32_counts(kind: str, size: int) -> None:
    """A layer's K of a large GPU. An offset that wrapped around would find zeros, in the half before the pool."""
    from minisgl.attention.triton_kernels import decode, extend

    pool = zeros((2**32 + size * 2 * 16,), torch.float16, DEVICE)[2**31 :].view(-1, 2, 16)
    page = 2**31 // (size * 2 * 16)
    own = pool[page * size : page * size + size]
    own.copy_(torch.randn(size, 2, 16))
    q = torch.randn(1, 4, 16, device=DEVICE).half()
    lengths, none = torch.tensor([size], device=DEVICE).int(), torch.zeros(1, device=DEVICE).int()

    def attend(cache: Tensor, pages: Tensor) -> Tensor:
        if kind == "decode":
            return decode(q, cache, cache, pages, lengths, none, size, 1)
        starts, tiles = torch.tensor([0, 1], device=DEVICE).int(), torch.zeros(1, 2, device=DEVICE).int()
        return extend(q, cache, cache, pages, lengths, starts, tiles, size)

    assert torch.equal(attend(pool, none[None] + page), attend(own.clone(), none[None]))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_recorded_rows_are_filled_for_each_step(name: str, dtype: torch.dtype) -> None:
    """Long rows before short ones: nothing of them may be left; the dummy rows of the padding read the dummy page."""
    torch.manual_seed(0)
    for shape in shapes(16, dtype):
        attention = backend(name, shape)
        recorded = None
        for lengths in ([(n - 1, n) for n in (150, 90, 4)], [(2, 3)], [(33, 34), (0, 1)]):
            scene = Scene.build([*lengths, *[(0, 200)] * 2], 3, shape, 100.0)  # the table is as wide in each
            batch = scene.batch
            dummy = Req(-1, torch.zeros(1, dtype=torch.int32), SamplingParams(max_tokens=1), len(scene.table) - 1)
            batch.reqs, batch.num_decode = batch.reqs[: len(lengths)], len(lengths)
            batch.padded_reqs = batch.reqs + [dummy] * (4 - len(lengths))
            if recorded is None:
                attention.init_capture_graph(4, scene.table)
                recorded = attention.prepare_for_capture(Batch([dummy] * 4, num_decode=4))
            batch.attn_metadata = attention.prepare_metadata(batch, scene.table)
            scene.table[: len(lengths)] = -1 if DEVICE.type == "cpu" else scene.table[: len(lengths)]
            attention.prepare_for_replay(batch)
            q = torch.randn(4, shape.q_heads, shape.head_dim).to(shape.device, shape.dtype)
            eager = attention.decode.attend(q, 0, scene.pool, batch.attn_metadata.decode)
            replayed = attention.decode.attend(q, 0, scene.pool, recorded.decode)
            n = len(lengths)
            torch.testing.assert_close(replayed[:n], eager[:n], atol=1e-2, rtol=1e-2)
            assert torch.isfinite(replayed).all()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_recorded_steps_with_prompts_are_those_of_no_graph(name: str, dtype: torch.dtype) -> None:
    """Of any kind, one after the other in the same buffers, and with a request that only fills up."""
    torch.manual_seed(0)
    tokens = 256
    for shape in shapes(16, dtype):
        attention = backend(name, shape)
        recorded = None
        for lengths, num_decode in ((MIXED, 1), ([(0, 130)], 0), ([(40, 41), (150, 151), (64, 70), (0, 90)], 2)):
            scene = Scene.build([*lengths, *[(0, 300)] * (7 - len(lengths))], num_decode, shape, 100.0)
            batch = scene.batch
            batch.padded_reqs = batch.reqs = batch.reqs[: len(lengths)]
            n = batch.num_tokens
            batch.padded_reqs = [*batch.reqs, dummy(tokens - n, scene)]
            if recorded is None:
                if not attention.can_record_steps():
                    pytest.skip("a planned decode is in no graph of prompts")
                attention.init_capture_steps(3, 8, tokens, scene.table)
                recorded = attention.prepare_for_capture(Batch([dummy(tokens, scene)]))
            batch.attn_metadata = attention.prepare_metadata(batch, scene.table)
            attention.prepare_for_replay(batch)
            q = torch.randn(tokens, shape.q_heads, shape.head_dim).to(shape.device, shape.dtype)
            replayed = attention.attend_cached(q, 0, scene.context(recorded))
            eager = attention.attend_cached(q, 0, scene.context(batch.attn_metadata))
            torch.testing.assert_close(replayed[:n], eager[:n], atol=1e-2, rtol=1e-2)
            assert torch.isfinite(replayed).all()


def dummy(tokens: int, scene: Scene) -> Req:
    return Req(-1, torch.zeros(tokens, dtype=torch.int32), SamplingParams(max_tokens=1), len(scene.table) - 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_registers_hold_what_a_kernel_needs(dtype: torch.dtype) -> None:
    """What they do not hold lies in memory, which the GPU keeps for all threads it could run: once 2.7 GiB."""
    for shape in shapes(16, dtype):
        scene = Scene.build(MIXED, 3, shape, torch.nan)
        attention = backend("triton", shape)
        scene.check(attention, attention.prepare_metadata(scene.batch, scene.table))
    gpu = torch.cuda.get_device_properties(DEVICE)
    threads = gpu.multi_processor_count * gpu.max_threads_per_multi_processor
    for function in (triton_kernels._decode_part, triton_kernels._extend):
        compiled = function.device_caches[torch.cuda.current_device()][0].values()
        assert len(compiled) >= 2
        assert max(kernel.n_spills for kernel in compiled) * 4 * threads < 256 << 20


@pytest.mark.gpu
def test_auto_falls_back_and_says_why(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.INFO, "minisgl"):
        create_attention("auto", 16, 8, 128, 16, torch.bfloat16, DEVICE)
        create_attention("auto", 16, 8, 128, 16, torch.float32, DEVICE)
    first, second = [r.getMessage() for r in caplog.records if r.getMessage().startswith("attention: prefill")]
    assert "FlashInfer" in first
    assert "FlashInfer" not in second, "it has no float32 kernels"
