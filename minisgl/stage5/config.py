"""What can be set about the scheduler. Does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minisgl.core.config import option
from minisgl.stage4.config import CacheConfig


@dataclass(frozen=True)
class SchedulerConfig(CacheConfig):
    group: ClassVar[str] = "scheduler"

    max_prefill_length: int | None = option(
        None,
        "tokens computed in one step, those of running requests first: longer prompts are cut; default: 2048 on a GPU, "
        "256 on a CPU",
        metavar="N",
    )
    schedule_policy: str = option(
        "mixed",
        "prefill-first: running requests stop for prompts; mixed: they get a token in every step, prompts what is left "
        "of it; cache-aware: mixed, and prompts that begin with what is cached go first",
        ("prefill-first", "mixed", "cache-aware"),
    )
    admission: str = option(
        "estimate",
        "reserve: a request waits until all pages it may ever need are there; estimate: until those are there that an "
        "answer takes on average; when they run out, the last to come is retracted and computed again later",
        ("reserve", "estimate"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("max_prefill_length", 1)
