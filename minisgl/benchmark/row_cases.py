"""The cases of `kernels` that copy rows: K and V to their slots, embeddings by id, in each form. Times nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.benchmark.kernel_cases import Case, Shape
from minisgl.kernel.jit import CannotCompile
from minisgl.kernel.prefix import common_length, common_length_numpy
from minisgl.kernel.rows import row_kernels
from minisgl.kernel.triton_runs import triton_runs
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RotaryEmbedding

Call = Callable[[], object]


def kv_store(s: Shape) -> Case:
    """K and V of new tokens, parts of the qkv projection's rows, to slots that lie apart."""
    k, v, cache, out_loc = _new_tokens(s)[1:]
    forms = _forms(s, lambda form: lambda: form.store_rows(k, v, cache[0], cache[1], out_loc))
    moved = 2 * (k.numel() + v.numel()) * s.dtype.itemsize + out_loc.nbytes
    return Case(moved, {**_flashinfer_append(s, k, v, cache), **forms})


def embedding_gather(s: Shape) -> Case:
    """Embeddings of a batch by a rank that has half of the vocabulary, zeros for the other half. "whole": by the one
    rank that has all of it, which plain torch does with one kernel."""
    table = s.random(s.config.vocab_size // 2, s.config.hidden_size)
    ids = torch.randint(0, s.config.vocab_size, (s.batch,), dtype=torch.int32, device=s.device)
    inside, row = ids % len(table), s.config.hidden_size * s.dtype.itemsize
    forms = _forms(s, lambda form: lambda: form.gather_rows(table, ids, 0))
    moved = (int((ids < len(table)).sum()) + s.batch) * row + ids.nbytes
    return Case(moved, {**forms, "torch, whole": lambda: F.embedding(inside, table)})


def norm_rope_store(s: Shape) -> Case:
    """What stands between the qkv projection and attention: in one kernel, as the engine has it; and apart, with the
    best store there is."""
    q_heads, dim = s.config.num_heads, s.config.head_dim
    heads, k, v, cache, out_loc = _new_tokens(s)
    q, norm = heads[:, :q_heads], RMSNorm(dim, 1e-6)
    norm.weight = torch.nn.Parameter(s.random(dim), requires_grad=False)
    positions = torch.full((s.batch,), s.context - 1, dtype=torch.int64, device=s.device)
    rotary = RotaryEmbedding(s.config.rope, dim, s.context, s.dtype, s.device)
    turn = rotary(positions)

    def apart(normed: Callable[[Tensor], Tensor], form: Any) -> Tensor:
        form.store_rows(turn.apply(normed(k)), v, cache[0], cache[1], out_loc)
        return turn.apply(normed(q))

    forms: dict[str, Call] = {}
    if triton_runs(s.device):
        from minisgl.kernel.triton_norm import rms_norm
        from minisgl.kernel.triton_rope import norm_rope_store as fused

        weights = norm.weight, norm.weight
        forms["fused"] = lambda: fused(
            heads, q_heads, weights, 1e-6, rotary.table, positions, cache[0], cache[1], out_loc
        )
        stores = _forms(s, lambda form: lambda: apart(lambda x: rms_norm(x, norm.weight, 1e-6), form))
        forms |= {f"apart, store by {name}": call for name, call in stores.items() if name != "torch"}
    forms["torch"] = lambda: apart(norm.forward, row_kernels(s.device)["torch"])
    return Case(2 * heads.nbytes, forms)


def common_prefix(s: Shape) -> Case:
    """The radix cache's comparison of a prompt of `context` tokens with an edge that agrees, on the host."""
    a = torch.randint(0, s.config.vocab_size, (s.context,), dtype=torch.int32)
    b = a.clone()
    forms: dict[str, Call] = {"minisgl": lambda: common_length(a, b), "numpy": lambda: common_length_numpy(a, b)}
    return Case(a.nbytes + b.nbytes, {**forms, "torch": lambda: int((a == b).int().cumprod(0).sum())}, on_host=True)


CASES: dict[str, Callable[[Shape], Case]] = {
    "norm_rope_store": norm_rope_store,
    "kv_store": kv_store,
    "embedding_gather": embedding_gather,
    "common_prefix": common_prefix,
}


def _new_tokens(s: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All heads of a batch's tokens, their K and V, a cache of a page for each, and the first slot of each page."""
    c = s.config
    heads = s.random(s.batch, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
    k, v = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)[1:]
    cache = s.random(2, s.batch * s.page_size, c.num_kv_heads, c.head_dim)
    return heads, k, v, cache, torch.arange(s.batch, dtype=torch.int32, device=s.device) * s.page_size


def _forms(s: Shape, call: Callable[[Any], Call]) -> dict[str, Call]:
    """With each of `kernel.rows` that runs here."""
    found = {}
    for name, form in row_kernels(s.device).items():
        try:
            call(form)()
            found[name] = call(form)
        except CannotCompile as error:
            print(f"  {name} cannot run here: {error}", file=sys.stderr)
    return found


def _flashinfer_append(s: Shape, k: Tensor, v: Tensor, cache: Tensor) -> dict[str, Call]:
    try:
        from flashinfer import append_paged_kv_cache

        pages = tuple(cache.view(2, s.batch, s.page_size, *cache.shape[2:]))
        rows = torch.arange(s.batch + 1, dtype=torch.int32, device=s.device)
        row, first, lengths = rows[:-1], torch.zeros_like(rows[:-1]), torch.ones_like(rows[:-1])
        call = lambda: append_paged_kv_cache(k, v, row, first, pages, row, rows, lengths)  # noqa: E731
        call()
    except (ImportError, RuntimeError, ValueError) as error:
        print(f"  flashinfer cannot run here: {str(error).splitlines()[0]:.100}", file=sys.stderr)
        return {}
    return {"flashinfer": call}
