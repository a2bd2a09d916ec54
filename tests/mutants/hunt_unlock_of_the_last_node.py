"""Bug 7: unlocks the node that a prefix ends with, and not those above it."""

from __future__ import annotations

from minisgl.core.protocols import CacheHandle
from minisgl.stage4.radix_cache import RadixCache


class MyRadixCache(RadixCache):
    def unlock(self, handle: CacheHandle) -> None:
        path = self._path(handle)
        if path and path[0].ref_count == 0:
            raise RuntimeError(f"a prefix of {handle.cached_len} tokens is unlocked more often than it was locked")
        for node in path[:1]:
            node.ref_count -= 1
            if node.ref_count == 0:
                self.protected_size -= node.length
                self.evictable_size += node.length
