"""What can be set about the prefix cache. Does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minisgl.core.config import option
from minisgl.stage3.config import EngineConfig


@dataclass(frozen=True)
class CacheConfig(EngineConfig):
    group: ClassVar[str] = "prefix cache"

    cache: str = option("radix", "radix remembers prefixes for later requests, naive nothing", ("radix", "naive"))
