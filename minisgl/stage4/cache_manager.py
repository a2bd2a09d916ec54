"""Pages for requests: found in the prefix cache, allocated, cached for the next request, freed once. Knows no policy.

Each page is in exactly one place: free in the allocator, in the prefix cache, or held by one request's row alone.
A row is its request's prefix in the cache (`req.cache_handle`, locked), then pages that it holds alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl.core.protocols import CacheHandle
from minisgl.core.req import Req
from minisgl.stage3.page_pool import PageAllocator
from minisgl.stage3.page_table import PageTable
from minisgl.stage4.naive_cache import NaiveCache
from minisgl.stage4.radix_cache import RadixCache

if TYPE_CHECKING:
    from minisgl.core.trace import Tracer


_EVICT_AHEAD = 64  # a sixty-fourth of the pool at a time


class CacheManager:
    """All that a loop or a scheduler needs to know of pages. Sizes are in tokens, of whole pages."""

    def __init__(self, table: PageTable, num_pages: int, cache: str, tracer: Tracer) -> None:
        self.table = table
        self.page_size = table.page_size
        self.num_pages = num_pages
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(self.page_size) if cache == "radix" else NaiveCache()
        self.tracer = tracer
        self.queried_tokens = 0  # of all requests when they were given a row; one that comes back counts again
        self.hit_tokens = 0  # those of them that were found in the cache
        self.evicted_tokens = 0
        self._row_end: dict[int, int] = {}  # uid -> tokens its row has room for, once it was given pages
        self._freed: list[Tensor] | None = None  # pages that wait for the end of `freeing`

    @property
    def available_size(self) -> int:
        """Tokens that `allocate` can find room for."""
        return self.allocator.num_free * self.page_size + self.cache.evictable_size

    @property
    def available_pages(self) -> int:
        return self.available_size // self.page_size

    def match_req(self, input_ids: Tensor) -> CacheHandle:
        """The longest cached prefix of a prompt (int32, on the host) that leaves at least one token to compute: the
        answer begins with that token's logits. Lock it before anything is allocated, or it may be evicted."""
        return self.cache.match_prefix(input_ids[:-1])

    def lock(self, handle: CacheHandle) -> None:
        """What it covers is no longer part of `available_size`."""
        self.cache.lock(handle)

    def unlock(self, handle: CacheHandle) -> None:
        self.cache.unlock(handle)

    def allocate(self, reqs: Sequence[Req]) -> None:
        """Pages for the next forward of all these requests, written to the page table. Evicts what is missing.
        Raises RuntimeError, and changes nothing, when `available_size` is less than they need."""
        growing = [req for req in reqs if self.table.pages_needed(req)]
        if not growing:
            return
        wanted = sum(map(self.table.pages_needed, growing))
        self._evict(wanted - self.allocator.num_free)
        self.table.assign(growing, self.allocator.allocate(wanted))
        for req in growing:
            before = self._row_end.get(req.uid)
            if before is None:  # a row that is new has no page for the token to compute
                self.queried_tokens += len(req.input_ids)
                self.hit_tokens += req.cached_len
            self.table.trace_row(self.tracer, req, before or 0, req.device_len)
            self._row_end[req.uid] = -(-req.device_len // self.page_size) * self.page_size
        self._trace_pages()

    def cache_req(self, req: Req, finished: bool) -> None:
        """Put what the host knows to be complete into the cache, for others to find. A finished (or aborted) request
        gives up all its pages; call it once no launched batch can write to them. One that goes on holds its prefix
        there, locked.

        Others may have cached the same tokens since this request matched. The cache keeps theirs: the row is pointed
        at those before the duplicates are freed, because the request still reads them.
        """
        if finished and req.in_flight:
            raise RuntimeError(f"{req!r} is freed while {req.in_flight} launched batches still use its pages")
        row, old = req.table_idx, req.cache_handle
        old_len = old.cached_len if old else 0
        end = self._row_end.get(req.uid, old_len)
        known_len = min(req.committed_len, end)
        known, handle = self.cache.insert_prefix(req.input_ids[:known_len], self.table.slots(row, known_len))
        if known > old_len:
            duplicates = self.table.pages(row, old_len, known)
            self.table.set_prefix(row, handle.slots()[:known])
            self.table.trace_row(self.tracer, req, old_len, end)
            self._free(duplicates)
        self.cache.lock(handle)
        if old:
            self.cache.unlock(old)
        req.cache_handle = handle
        if finished:
            self._release(req, end)
        self._trace_pages()

    def _release(self, req: Req, end: int) -> None:
        """Free what the row holds alone: the last page that is not full, and all after the committed tokens."""
        self.table.trace_row(self.tracer, req, 0, 0)
        self._free(self.table.pages(req.table_idx, req.cache_handle.cached_len, end))
        self.cache.unlock(req.cache_handle)
        req.cache_handle = None
        self._row_end.pop(req.uid, None)

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """Collect what many requests free into one operation of the allocator, at the end. Until then those pages
        are part of no size: allocate nothing inside."""
        freed: list[Tensor] = []
        outer, self._freed = self._freed, freed
        try:
            yield
        finally:
            self._freed = outer
            if freed:
                self._free(torch.cat(freed))
            self._trace_pages()

    def _free(self, pages: Tensor) -> None:
        if self._freed is None:
            self.allocator.free(pages)
            if self.tracer.enabled:
                self.tracer.instant("free_pages", "cache", pages=pages.tolist())
        else:
            self._freed.append(pages)

    def _evict(self, pages: int) -> None:
        """Move at least `pages` pages from the cache to the allocator. A few more than asked for, since finding the
        oldest walks the tree: with a full pool every other step would, for 2 ms at 8,000 leaves."""
        if pages <= 0:
            return
        ahead = max(pages, self.num_pages // _EVICT_AHEAD)
        slots = self.cache.evict(max(pages * self.page_size, min(ahead * self.page_size, self.cache.evictable_size)))
        evicted = slots[:: self.page_size] // self.page_size
        self.allocator.free(evicted)
        self.evicted_tokens += len(slots)
        if self.tracer.enabled:
            self.tracer.instant("evict", "cache", tokens=len(slots), pages=evicted.tolist())

    def flush(self) -> None:
        """Free every cached page that no request holds."""
        self._evict(self.cache.evictable_size // self.page_size)
        self._trace_pages()

    def _trace_pages(self) -> None:
        if self.tracer.enabled and self._freed is None:
            evictable, protected = self.cache.evictable_size, self.cache.protected_size
            sizes = {"evictable": evictable // self.page_size, "protected": protected // self.page_size}
            rows = self.num_pages - self.allocator.num_free - sum(sizes.values())
            self.tracer.counter("pages", free=self.allocator.num_free, rows=rows, **sizes)

    def stats(self) -> dict[str, int]:
        cached = self.cache.evictable_size + self.cache.protected_size
        return {
            "pages_total": self.num_pages,
            "pages_free": self.allocator.num_free,
            "pages_cached": cached // self.page_size,
            "hit_tokens": self.hit_tokens,
        }

    def check_integrity(self, reqs: Sequence[Req]) -> None:
        """reqs: all that hold a row. Raises AssertionError unless each page is in one place, each row begins with its
        prefix in the cache, and nothing is locked but those prefixes. For tests and idle moments."""
        self.allocator.check_integrity()
        self.cache.check_integrity()
        free, cached = self.allocator.free_pages(), self.cache.all_slots()[:: self.page_size] // self.page_size
        rows, locked = [], [torch.empty(0, dtype=torch.int32)]
        for req in reqs:
            old_len = req.cache_handle.cached_len if req.cache_handle else 0
            end = self._row_end.get(req.uid, old_len)
            rows.append(self.table.pages(req.table_idx, old_len, end))
            if req.cache_handle:
                locked.append(req.cache_handle.slots())
                if not torch.equal(locked[-1], self.table.slots(req.table_idx, old_len)):
                    raise AssertionError(f"the row of {req!r} does not begin with its prefix in the cache")
        owned = torch.cat([free, cached, *rows])
        counts = f"{len(free)} free + {len(cached)} cached + {sum(map(len, rows))} in rows, of {self.num_pages} pages"
        if len(owned.unique()) != len(owned):
            raise AssertionError(f"a page is in two places: {counts}")
        if len(owned) != self.num_pages:
            raise AssertionError(f"pages are lost: {counts}")
        protected = len(torch.cat(locked).unique())
        if protected != self.cache.protected_size:
            raise AssertionError(f"{self.cache.protected_size} tokens are locked, and the requests lock {protected}")
