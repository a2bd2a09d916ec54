"""Stand-ins of packages that are not here: FlashAttention's functions and TensorRT-LLM's, with their documented
parameters, refusing what those refuse, and computing what they promise in plain torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from paged_scene import causal
from torch import Tensor


def check_int32(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def check_pages(k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> None:
    check_int32(table, lengths)
    assert k.shape == v.shape
    assert k.dim() == 4, "[pages, page_size, kv_heads, head_dim]"
    assert table.dim() == 2
    assert lengths.shape == (len(table),)
    assert int(lengths.max()) <= table.shape[1] * k.shape[1]


def rows_of(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, table: Tensor, scale: float) -> Tensor:
    outs = []
    for i, length in enumerate(lengths.tolist()):
        own = q[starts[i] : starts[i + 1]]
        pages = table[i, : -(-length // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        outs.append(causal(own, keys, values, scale))
    return torch.cat(outs)


def one_each(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, scale: float) -> Tensor:
    assert q.dim() == 4, "[rows, 1, q_heads, head_dim]"
    starts = torch.arange(len(q) + 1)
    return rows_of(q.flatten(0, 1), k, v, starts, lengths, table, scale)[:, None]


def flash_attn_interface(calls: list[str]) -> ModuleType:
    """FlashAttention 3."""

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, qv: Any = None,
        rotary_cos: Any = None, rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None,
        cache_leftpad: Any = None, page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None,
        max_seqlen_q: int | None = None, rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None,
        v_descale: Any = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
        rotary_interleaved: bool = True, scheduler_metadata: Any = None, num_splits: int = 0, pack_gqa: Any = None,
        sm_margin: int = 0, return_softmax_lse: bool = False,
    ) -> Tensor:  # fmt: skip
        calls.append("decode" if cu_seqlens_q is None else "extend")
        check_pages(k_cache, v_cache, page_table, cache_seqlens)
        assert causal
        assert softmax_scale is not None
        if cu_seqlens_q is None:
            return one_each(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale)
        check_int32(cu_seqlens_q)
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        return rows_of(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale)

    return module("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)


def flash_attn_cute(calls: list[str], hopper: bool = True) -> ModuleType:
    """FlashAttention 4 (4.0.0b36): it returns a pair, and cu_seqlens_k may not be given with pages. On Hopper it fails
    when a row's keys are cut into parts, which 0 lets it choose."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, min_seqlen_k: int | None = None,
        seqused_q: Any = None, seqused_k: Any = None, gather_kv_indices: Any = None, page_table: Any = None,
        softmax_scale: float | None = None, causal: bool = False, window_size: Any = (None, None),
        learnable_sink: Any = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: Any = None,
        deterministic: bool = False, score_mod: Any = None, score_mod_bwd: Any = None, mask_mod: Any = None,
        block_sparse_tensors: Any = None, aux_tensors: Any = None, aux_scalars: Any = None, return_lse: bool = False,
        scheduler_metadata: Any = None, seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: int | None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        calls.append("decode" if cu_seqlens_q is None else "extend")
        check_pages(k, v, page_table, seqused_k)
        assert causal
        assert cu_seqlens_k is None
        assert softmax_scale is not None
        assert q.shape[-1] % 16 == 0, "Paged KV does not support irregular head dim"
        assert num_splits == 1 or not hopper, "SplitKV not supported on SM 9.0"
        if cu_seqlens_q is None:
            return one_each(q, k, v, seqused_k, page_table, softmax_scale), None
        check_int32(cu_seqlens_q)
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        return rows_of(q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale), None

    return module("flash_attn.cute", flash_attn_varlen_func=flash_attn_varlen_func)


def flash_attn(calls: list[str]) -> ModuleType:
    """FlashAttention 2: pages of 256 tokens, and lengths summed up."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
    ) -> Tensor:  # fmt: skip
        calls.append("extend")
        check_int32(cu_seqlens_q, cu_seqlens_k)
        check_pages(k, v, block_table, lengths := cu_seqlens_k.diff())
        assert causal
        assert k.shape[1] % 256 == 0
        assert cu_seqlens_k[0] == 0
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert max_seqlen_k >= int(lengths.max())
        assert softmax_scale is not None
        return rows_of(q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale)

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any = None, v: Any = None, rotary_cos: Any = None,
        rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
        block_table: Any = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
        alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False,
    ) -> Tensor:  # fmt: skip
        calls.append("decode")
        check_pages(k_cache, v_cache, block_table, cache_seqlens)
        assert causal
        assert k_cache.shape[1] % 256 == 0
        assert softmax_scale is not None
        return one_each(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale)

    return module(
        "flash_attn",
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        __path__=[],  # a package, which flash_attn.cute may be in
    )


def flashinfer(calls: list[str]) -> dict[str, ModuleType]:
    """What `attention.trtllm` imports of it."""

    def trtllm_batch_context_with_kv_cache(
        query: Tensor, kv_cache: Any, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor, max_q_len: int,
        max_kv_len: int, bmm1_scale: float, bmm2_scale: float, batch_size: int, cum_seq_lens_q: Tensor,
        cum_seq_lens_kv: Tensor, window_left: int = -1, out: Any = None, out_dtype: Any = None, o_sf_scale: Any = None,
        o_sf_vec_size: Any = None, kv_layout: str = "HND", **_: Any,
    ) -> Tensor:  # fmt: skip
        calls.append("extend")
        check_pages(*kv_cache, block_tables, seq_lens)
        check_int32(cum_seq_lens_q, cum_seq_lens_kv)
        assert not workspace_buffer.any()
        assert kv_layout == "NHD"
        assert bmm2_scale == 1.0
        assert batch_size == len(seq_lens)
        assert torch.equal(cum_seq_lens_kv.diff(), seq_lens)
        assert max_q_len == int(cum_seq_lens_q.diff().max())
        assert max_kv_len >= int(seq_lens.max())
        return rows_of(query, *kv_cache, cum_seq_lens_q, seq_lens, block_tables, bmm1_scale)

    def trtllm_batch_decode_with_kv_cache(
        query: Tensor, kv_cache: Any, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
        max_seq_len: int, bmm1_scale: float = 1.0, bmm2_scale: float = 1.0, window_left: int = -1, out: Any = None,
        out_dtype: Any = None, o_sf_scale: Any = None, o_sf_vec_size: Any = None, sinks: Any = None,
        kv_layout: str = "HND", enable_pdl: Any = None, backend: str = "auto", **_: Any,
    ) -> Tensor:  # fmt: skip
        calls.append(f"decode by {backend}")
        check_pages(*kv_cache, block_tables, seq_lens)
        assert not workspace_buffer.any()
        assert kv_layout == "NHD"
        assert bmm2_scale == 1.0
        assert max_seq_len >= int(seq_lens.max())
        starts = torch.arange(len(query) + 1)
        return rows_of(query, *kv_cache, starts, seq_lens, block_tables, bmm1_scale)

    return {
        "flashinfer": module("flashinfer", __path__=[]),
        "flashinfer.decode": module(
            "flashinfer.decode", trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache
        ),
        "flashinfer.prefill": module(
            "flashinfer.prefill", trtllm_batch_context_with_kv_cache=trtllm_batch_context_with_kv_cache
        ),
    }


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made
