"""Which attention runs: what `--attn` names, or what measures best here, with the reason in the log.

torch            plain torch: the reference, and what a CPU runs
triton           our own kernels: any dtype on Ampere and later, as Triton itself; no nvcc
fi               FlashInfer's kernels: bfloat16 and float16 on Ampere and later
fa               FlashAttention's packages, whichever is installed: the same dtypes
trtllm           TensorRT-LLM's kernels, which FlashInfer carries: Hopper and later
PREFILL,DECODE   two of the last four
auto             fi,triton, else triton, else fi, else torch
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minisgl.attention.hybrid import DecodePart, HybridAttention, PrefillPart
from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.attention.shape import Shape
from minisgl.core.protocols import AttentionBackend
from minisgl.kernel.triton_runs import no_compiler

log = logging.getLogger("minisgl")

_CPU = torch.device("cpu")
_PARTS = ("triton", "fi", "fa", "trtllm")
_XQA_PAGES = (16, 32, 64, 128)
_FEW_TOKENS = 2048  # prompts of a batch together; up to here a GPU waits for launches
_FASTEST = "these are the fastest on an H200; `python -m minisgl.benchmark kernels` compares here"
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)  # FlashInfer's CUDA-core decode is compiled for these


def create_attention(
    name: str,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
) -> AttentionBackend:
    """Heads of this rank. Raises ValueError for a name it does not know, and for one that cannot run here."""
    shape = Shape(num_q_heads, num_kv_heads, head_dim, page_size, dtype, device)
    if name == "auto":
        return _best(shape)
    if name == "torch":
        return PagedTorchAttention(*shape[:4])
    check_attention(name, dtype, device)
    parts = name.split(",")
    return _hybrid(parts[0], parts[-1], shape)


def check_attention(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """What can be said of a name before there is a model. Raises ValueError for one that is not known or cannot run."""
    if name in ("auto", "torch"):
        return
    parts = name.split(",")
    if len(parts) > 2 or any(part not in _PARTS for part in parts):
        known = f"auto, torch, {', '.join(_PARTS)}, or two of the last as PREFILL,DECODE"
        raise ValueError(f"attention backend must be {known}, not {name!r:.80}")
    for part in parts:
        if reason := _missing(part, dtype, device):
            raise ValueError(f"--attn {name}: {reason}; --attn auto takes what runs here")


def _best(s: Shape) -> AttentionBackend:
    if s.device.type == "cpu":
        log.debug("attention: plain torch (auto: a CPU has no other)")
        return PagedTorchAttention(*s[:4])
    # Times of a decode layer on an H200, 256 rows of 100 to 2000 tokens, over what reading K and V takes, with 2 and 4
    # query heads a KV head: ours 1.02 and 1.04, FlashInfer's xqa 1.12 with pages of 64 and 1.23 with 16, its planned
    # kernels 1.22 and 1.06.
    reasons: dict[str, None] = {}
    for prefill, decode in (("fi", "triton"), ("triton", "triton"), ("fi", "fi")):
        reason = _missing(prefill, s.dtype, s.device) or _missing(decode, s.dtype, s.device)
        if reason is None:
            try:
                return _hybrid(prefill, decode, s, f" (auto: {'; '.join(reasons) or _FASTEST})")
            except Exception as error:  # a kernel that does not compile or load here, for whatever reason
                reason = f"{prefill} failed: {_first_line(error):.200}"
        reasons[reason] = None
    log.warning("attention: plain torch, slow (%s)", "; ".join(reasons))
    return PagedTorchAttention(*s[:4])


def _missing(part: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why kernels of this kind cannot run here, None when they can."""
    package = {"fi": "flashinfer", "trtllm": "flashinfer", "triton": "triton"}.get(part)
    if device.type != "cuda":
        return f"{part} needs a CUDA GPU"
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{part} needs the package {package}, which is not installed (pip install 'minisgl[cuda]')"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{part} needs a GPU of compute capability 8.0 or more"
    if part != "triton" and dtype == torch.float32:
        return f"{part} has no float32 kernels"
    if part == "trtllm" and torch.cuda.get_device_capability(device) < (9, 0):
        return "trtllm needs a GPU of compute capability 9.0 or more"
    return no_compiler() if part == "triton" else None


def _hybrid(prefill: str, decode: str, s: Shape, why: str = "") -> HybridAttention:
    first, first_kind = _prefill_part(prefill, s)
    second, second_kind = _decode_part(decode, s)
    kinds = f"prefill by {first_kind}, decode by {second_kind}"
    log.info("attention: %s, %d query heads a KV head, pages of %d%s", kinds, s.group, s.page_size, why)
    return HybridAttention(first, second, _recorded_steps(first, second, s))


def _prefill_part(name: str, s: Shape) -> tuple[PrefillPart, str]:
    """And what it is, in words."""
    if name == "fa":
        from minisgl.attention.fa import FlashPrefill, flash_attention

        kernel = flash_attention(s)
        return FlashPrefill(kernel), kernel.release.name
    if name == "trtllm" and _generation(s) == 10:
        from minisgl.attention.trtllm import FmhaPrefill

        return FmhaPrefill(s), "TensorRT-LLM fmha"
    if name == "trtllm":
        log.info("attention: TensorRT-LLM has no kernel for prompts on this GPU; FlashInfer's takes them")
    if name == "triton":
        from minisgl.attention.triton_attention import TritonPrefill

        return TritonPrefill(s.page_size), "our Triton kernel"
    from minisgl.attention.triton_attention import PrefillBySize, TritonPrefill

    large, kind = _flashinfer_prefill(s)
    if _missing("triton", s.dtype, s.device):
        return large, kind
    return PrefillBySize(TritonPrefill(s.page_size), large, _FEW_TOKENS), kind


def _recorded_steps(prefill: PrefillPart, decode: DecodePart, s: Shape) -> Callable[..., Any] | None:
    """See `HybridAttention`: where our kernel takes few prompts, and decode rows are as our kernel reads them."""
    if _missing("triton", s.dtype, s.device):
        return None
    from minisgl.attention.paged_rows import PagedDecode
    from minisgl.attention.step_rows import RecordedSteps
    from minisgl.attention.triton_attention import PrefillBySize, TritonPrefill
    from minisgl.attention.triton_kernels import TILE

    if not isinstance(prefill, PrefillBySize | TritonPrefill) or not isinstance(decode, PagedDecode):
        return None
    return partial(RecordedSteps, page_size=s.page_size, tile=TILE)


def _decode_part(name: str, s: Shape) -> tuple[DecodePart, str]:
    if name == "fa":
        from minisgl.attention.fa import FlashDecode, flash_attention

        kernel = flash_attention(s)
        return FlashDecode(kernel), kernel.release.name
    if name == "trtllm":
        return _trtllm_decode(s)
    if name == "triton":
        from minisgl.attention.triton_attention import TritonDecode

        return TritonDecode(s.page_size), "our Triton kernel"
    return _flashinfer_decode(s)


def _generation(s: Shape) -> int:
    return torch.cuda.get_device_capability(s.device)[0]


def _trtllm_decode(s: Shape) -> tuple[DecodePart, str]:
    """What `fi` takes where it can, without its other kernels behind it. Raises ValueError where it cannot."""
    if _generation(s) == 10:
        from minisgl.attention.trtllm import FmhaDecode

        return FmhaDecode(s), "TensorRT-LLM fmha"
    if s.page_size not in _XQA_PAGES:
        raise ValueError(f"--attn trtllm: --page-size must be one of {_XQA_PAGES}, not {s.page_size}")
    try:
        return _xqa(s), "TensorRT-LLM xqa"
    except Exception as error:
        raise ValueError(
            f"--attn trtllm: its kernel xqa does not load here ({_first_line(error):.200}); --attn fi has others"
        ) from error


def _xqa(s: Shape) -> DecodePart:
    from flashinfer.xqa import get_xqa_module

    from minisgl.attention.fi import XqaDecode

    get_xqa_module(s.dtype, s.dtype, s.page_size, s.head_dim, s.group, False, s.dtype, 1)
    return XqaDecode(s)


def _flashinfer_prefill(s: Shape) -> tuple[PrefillPart, str]:
    """fa3 is written for Hopper: 250 µs against fa2's 369 for 16 prompts of 1024 on an H200."""
    from flashinfer.prefill import get_batch_prefill_module

    from minisgl.attention.fi import FlashInferPrefill

    kernels = ["fa3", "fa2"] if _generation(s) == 9 else ["fa2"]
    for kernel in kernels:
        try:
            dtypes = (s.dtype, s.dtype, s.dtype, torch.int32)
            get_batch_prefill_module(kernel, *dtypes, s.head_dim, s.head_dim, 0, False, False, False)
        except Exception as error:
            if kernel == kernels[-1]:
                raise
            log.info("attention: FlashInfer's %s does not load here (%s)", kernel, _first_line(error)[:120])
            continue
        return FlashInferPrefill(s, kernel), f"FlashInfer {kernel}"
    raise AssertionError


def _flashinfer_decode(s: Shape) -> tuple[DecodePart, str]:
    """In the order of an H200's times for 256 rows of 1024 tokens: xqa 259 to 262 µs a layer, tensor cores 275, CUDA
    cores 271 for 2 query heads a KV head and 360 for 4."""
    from minisgl.attention.fi import FlashInferDecode

    if _generation(s) in (9, 10, 12) and s.page_size in _XQA_PAGES:
        try:
            return _xqa(s), "FlashInfer xqa"
        except Exception as error:
            log.info("attention: FlashInfer's xqa does not load here (%s)", _first_line(error)[:120])
    tensor_cores = s.group >= 4 or s.group not in _CUDA_CORE_GROUPS
    return FlashInferDecode(s, tensor_cores), f"FlashInfer on {'tensor' if tensor_cores else 'CUDA'} cores"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
