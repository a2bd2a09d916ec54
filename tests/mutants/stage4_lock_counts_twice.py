"""4.4: moves the tokens with every lock."""

from __future__ import annotations

from minisgl.core.protocols import CacheHandle
from minisgl.stage4.radix_cache import RadixCache

kills = "tests/exercises/test_stage4.py::test_two_locks_need_two_unlocks"
words = "count once"


class MyRadixCache(RadixCache):
    def lock(self, handle: CacheHandle) -> None:
        for node in self._path(handle):
            self.evictable_size -= node.length
            self.protected_size += node.length
            node.ref_count += 1
