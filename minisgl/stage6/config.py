"""What can be set about ranks. Does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minisgl.core.config import option
from minisgl.stage5.config import SchedulerConfig

COMMUNICATORS = ("auto", "nccl", "pynccl", "pynccl-window", "symm")


@dataclass(frozen=True)
class ParallelConfig(SchedulerConfig):
    group: ClassVar[str] = "tensor parallelism"

    tp: int = option(1, "ranks (processes) the model is cut over: tensor parallelism", metavar="N")
    comm: str = option(
        "auto",
        "how ranks on GPUs add up their shares: nccl, pynccl (NCCL without torch's streams; -window: through buffers "
        "registered with it, which makes NVLink multicast objects unless NCCL_NVLS_ENABLE=0), or symm, which takes "
        "what is small through symmetric memory; auto is symm where the GPUs can, else nccl",
        COMMUNICATORS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("tp", 1)
