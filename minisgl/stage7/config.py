"""What can be set about overlap and graphs. Does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minisgl.core.config import option
from minisgl.stage6.config import ParallelConfig


@dataclass(frozen=True)
class OverlapConfig(ParallelConfig):
    group: ClassVar[str] = "overlap and CUDA graphs"

    disable_overlap: bool = option(False, "schedule a step only when the one before it is done")
    cuda_graph_max_bs: int | None = option(
        None,
        "largest decode batch that runs as a CUDA graph, 0 for none; default: what the GPU has room for",
        metavar="N",
    )
    cuda_graph_max_prefill: int = option(
        2048,
        "most tokens of a step with prompts that runs as a CUDA graph, 0 for none; needs --attn auto, fi or triton",
        metavar="N",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("cuda_graph_max_bs", 0)
        self.at_least("cuda_graph_max_prefill", 0)
