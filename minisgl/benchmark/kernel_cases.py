"""The table of what `kernels` times: a part of a decode step, in its shapes, in each form there is. Times nothing.

To add a kernel, add a function from Shape to Case to CASES, or a form to a case that is there. The form "torch" is the
plain expression that the others are measured against, "minisgl" a layer's own code, and "triton" what takes its place
on a GPU.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.attention import create_attention
from minisgl.core.batch import Batch
from minisgl.core.context import Context
from minisgl.core.protocols import AttentionBackend
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.kernel.linear import linear, linear_in_halves, pack_linear
from minisgl.kernel.triton_runs import triton_runs
from minisgl.layers.activation import SiluAndMul
from minisgl.layers.norm import RMSNorm, RMSNormFused
from minisgl.layers.rotary import RotaryEmbedding
from minisgl.models.config import ModelConfig
from minisgl.stage3.page_pool import KVCachePool, PageAllocator
from minisgl.stage3.page_table import PageTable

BACKENDS = ("fi", "triton", "torch")  # of attention, and "fa" where its packages are
MOST_TOKENS = 16384  # of prompts in one step
Forms = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Shape:
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    batch: int
    context: int
    page_size: int

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Case:
    """moved: the fewest bytes that must be read and written. on_host: the time that counts is the host's."""

    moved: int
    forms: Forms
    on_host: bool = False


def rms_norm(s: Shape) -> Case:
    """The norm of every query head: small rows, many of them."""
    x, norm = s.random(s.batch, s.config.num_heads, s.config.head_dim), _norm(RMSNorm(s.config.head_dim, 1e-6), s)
    plain = lambda: F.rms_norm(x, (s.config.head_dim,), norm.weight, 1e-6)  # noqa: E731
    forms: Forms = {"minisgl": lambda: norm(x), "torch": plain}
    if triton_runs(s.device):
        from minisgl.kernel import triton_norm

        forms["triton"] = lambda: triton_norm.rms_norm(x, norm.weight, 1e-6)
    return Case(2 * x.nbytes, forms)


def add_rms_norm(s: Shape) -> Case:
    hidden = s.config.hidden_size
    x, residual, norm = s.random(s.batch, hidden), s.random(s.batch, hidden), _norm(RMSNormFused(hidden, 1e-6), s)

    def plain() -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (hidden,), norm.weight, 1e-6), total

    forms: Forms = {"minisgl": lambda: norm(x, residual), "torch": plain}
    if triton_runs(s.device):
        from minisgl.kernel import triton_norm

        forms["triton"] = lambda: triton_norm.add_rms_norm(x, residual, norm.weight, 1e-6)
    return Case(4 * x.nbytes, forms)


def rope(s: Shape) -> Case:
    heads, dim = s.config.num_heads + s.config.num_kv_heads, s.config.head_dim
    x = s.random(s.batch, heads, dim)
    turn = RotaryEmbedding(s.config.rope, dim, s.context + 1, s.dtype, s.device)(_positions(s))
    cos, sin = turn.cos[..., : dim // 2], turn.signed_sin[..., dim // 2 :]

    def plain() -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return Case(2 * x.nbytes, {"minisgl": lambda: turn.apply(x), "torch": plain})


def silu_and_mul(s: Shape) -> Case:
    size = s.config.intermediate_size
    x, gate = s.random(s.batch, 2 * size), SiluAndMul()
    plain = lambda: F.silu(x[:, :size]) * x[:, size:]  # noqa: E731
    forms: Forms = {"minisgl": lambda: gate(x), "torch": plain}
    if triton_runs(s.device):
        from minisgl.kernel import triton_norm

        forms["triton"] = lambda: triton_norm.silu_and_mul(x)
    return Case(x.nbytes * 3 // 2, forms)


def _linear(inputs: Callable[[ModelConfig], int], outputs: Callable[[ModelConfig], int]) -> Callable[[Shape], Case]:
    def case(s: Shape) -> Case:
        x, weight = s.random(s.batch, inputs(s.config)), s.random(outputs(s.config), inputs(s.config))
        packed = pack_linear(weight)
        moved = x.nbytes + weight.nbytes + s.batch * len(weight) * s.dtype.itemsize
        forms: Forms = {"minisgl": lambda: linear(x, packed, None), "torch": lambda: F.linear(x, weight)}
        if triton_runs(s.device):
            from minisgl.kernel.triton_linear import gemv

            forms |= (
                {"triton": lambda: gemv(x, weight)} if s.batch == 1 else {"halves": lambda: linear_in_halves(x, weight)}
            )
        return Case(moved, forms)

    return case


def attention_decode(s: Shape) -> Case:
    forms: Forms = {name: call for name, (_, call) in _attention(s, 1).items()}
    kv = 2 * s.batch * s.context * s.config.num_kv_heads * s.config.head_dim * s.dtype.itemsize
    return Case(kv, forms)


def attention_prefill(s: Shape) -> Case:
    """Whole prompts of `context` tokens: of the batch as many as a step of MOST_TOKENS has room for."""
    s = dataclasses.replace(s, batch=max(1, min(s.batch, MOST_TOKENS // s.context)))
    forms: Forms = {name: call for name, (_, call) in _attention(s, s.context).items()}
    heads = 2 * (s.config.num_heads + s.config.num_kv_heads)  # of q, k, v and what comes out
    return Case(s.batch * s.context * heads * s.config.head_dim * s.dtype.itemsize, forms)


def attention_metadata(s: Shape) -> Case:
    """What the host does for it once a step."""
    return Case(0, {name: prepare for name, (prepare, _) in _attention(s, 1).items()}, on_host=True)


CASES: dict[str, Callable[[Shape], Case]] = {
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "rope": rope,
    "silu_and_mul": silu_and_mul,
    "qkv_proj": _linear(lambda c: c.hidden_size, lambda c: (c.num_heads + 2 * c.num_kv_heads) * c.head_dim),
    "o_proj": _linear(lambda c: c.num_heads * c.head_dim, lambda c: c.hidden_size),
    "gate_up_proj": _linear(lambda c: c.hidden_size, lambda c: 2 * c.intermediate_size),
    "down_proj": _linear(lambda c: c.intermediate_size, lambda c: c.hidden_size),
    "lm_head": _linear(lambda c: c.hidden_size, lambda c: c.vocab_size),
    "attention_decode": attention_decode,
    "attention_prefill": attention_prefill,
    "attention_metadata": attention_metadata,
}


def _attention(s: Shape, new: int) -> dict[str, tuple[Callable[[], object], Callable[[], Tensor]]]:
    """By backend: its preparation of a step, and one layer of it. All requests have `context` tokens, the last `new` of
    which are computed."""
    config, reqs = s.config, requests(s, SamplingParams())
    pages = s.batch * -(-s.context // s.page_size)
    pool = KVCachePool(1, pages, s.page_size, config.num_kv_heads, config.head_dim, s.dtype, s.device)
    pool.k_cache(0).normal_()
    pool.v_cache(0).normal_()
    rows = PageTable(s.batch, s.context, s.page_size, pool.dummy_slot, s.device)
    rows.assign(reqs, PageAllocator(pages).allocate(pages))
    for req in reqs:
        req.cached_len = s.context - new
    batch = Batch(reqs, num_decode=s.batch if new == 1 else 0)
    positions = torch.arange(s.context - new, s.context, device=s.device).repeat(s.batch)  # [tokens]
    out_loc = rows.device[torch.arange(s.batch, device=s.device).repeat_interleave(new), positions]
    batch.positions, batch.out_loc, batch.logits_rows = positions, out_loc, None
    q, k, v = (s.random(s.batch * new, n, config.head_dim) for n in (config.num_heads, *[config.num_kv_heads] * 2))

    def forms(backend: AttentionBackend) -> tuple[Callable[[], object], Callable[[], Tensor]]:
        ids = torch.zeros_like(out_loc)
        context = Context(ids, positions, None, backend, None, pool, rows.device, out_loc)
        context = dataclasses.replace(context, attn_metadata=backend.prepare_metadata(batch, rows.device))
        prepare = lambda: backend.prepare_metadata(batch, rows.device)  # noqa: E731
        return prepare, lambda: backend.forward(q, k, v, 0, context)

    found = {}
    for name in (*BACKENDS, "fa"):
        try:
            shape = config.num_heads, config.num_kv_heads, config.head_dim, s.page_size, s.dtype, s.device
            backend = create_attention(name, *shape)
            found[name] = forms(backend)
        except (ValueError, RuntimeError, ImportError) as error:
            print(f"  attention backend {name} cannot run here: {error}", file=sys.stderr)
    return found


def requests(s: Shape, params: SamplingParams) -> list[Req]:
    prompt = torch.zeros(s.context, dtype=torch.int32)
    return [Req(i, prompt, dataclasses.replace(params, max_tokens=1), i) for i in range(s.batch)]


def _positions(s: Shape) -> Tensor:
    return torch.full((s.batch,), s.context - 1, dtype=torch.int64, device=s.device)


def _norm(norm: RMSNorm, s: Shape) -> RMSNorm:
    norm.weight = torch.nn.Parameter(s.random(len(norm.weight)), requires_grad=False)
    return norm
