"""4.4: counts on the last node alone."""

from __future__ import annotations

from minisgl.core.protocols import CacheHandle
from minisgl.stage4.radix_cache import RadixCache

kills = "tests/exercises/test_stage4.py::test_a_lock_protects_the_whole_path"
words = "whole path"


class MyRadixCache(RadixCache):
    def lock(self, handle: CacheHandle) -> None:
        for node in self._path(handle)[:1]:
            if node.ref_count == 0:
                self.evictable_size -= node.length
                self.protected_size += node.length
            node.ref_count += 1
