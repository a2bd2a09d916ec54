"""What can be set about the scheduler. Does not load torch."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.core.config import option
from minisgl.stage4.config import CacheConfig


@dataclass(frozen=True)
class SchedulerConfig(CacheConfig):
    max_prefill_length: int = option(8192, "prompt tokens computed in one step: longer prompts are cut", metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("max_prefill_length", 1)
