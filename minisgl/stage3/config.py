"""What can be set about an engine. Does not load torch: a process that only reads settings starts fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minisgl.core.config import Config, option

ATTENTION_KERNELS = ("triton", "fi", "fa", "trtllm")  # attention/choose.py has them; asking it would load torch


@dataclass(frozen=True)
class EngineConfig(Config):
    group: ClassVar[str] = "memory and attention"

    page_size: int = option(16, "tokens a page", metavar="N")
    num_pages: int | None = option(None, "pages in the pool; default: what memory allows", metavar="N")
    memory_ratio: float = option(0.9, "share of the free GPU memory for model and pool", metavar="R")
    max_running_requests: int = option(256, "requests in one batch at most", metavar="N")
    attn: str = option(
        "auto",
        "attention: auto, torch, triton, fi (FlashInfer), fa (FlashAttention), trtllm, or two as PREFILL,DECODE",
        metavar="NAME",
    )
    moe_backend: str = option(
        "auto", "experts: torch (a loop) or triton (kernels for a whole layer, on GPUs)", ("auto", "triton", "torch")
    )
    disable_fusion: bool = option(False, "on a GPU: run each layer's own torch code, not the fused kernels")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("page_size", 1)
        self.at_least("num_pages", 1)
        self.at_least("max_running_requests", 1)
        parts = self.attn.split(",")
        if self.attn not in ("auto", "torch") and (len(parts) > 2 or not set(parts) <= set(ATTENTION_KERNELS)):
            names = f"auto, torch, {', '.join(ATTENTION_KERNELS)}, or two of the last as PREFILL,DECODE"
            raise ValueError(f"--attn must be {names}, not {self.attn!r:.80}")
        if not 0 < self.memory_ratio <= 1:
            raise ValueError(f"--memory-ratio must be above 0 and at most 1, not {self.memory_ratio!r:.80}")
