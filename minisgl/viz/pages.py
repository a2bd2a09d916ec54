"""Which request holds which page, moment by moment: from a trace's events, or from live objects. Draws nothing.

Events, on the track "cache": `row_pages` (uid, start, pages): the request's row now has these pages from the start-th
on, and none after them; `free_pages` (pages) and `evict` (pages): they are free again. A page that no row has and that
was not freed is in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minisgl.core.trace import Event
from minisgl.viz.reading import of_one_rank, seconds

if TYPE_CHECKING:
    from minisgl.core.req import Req
    from minisgl.stage3.page_pool import PageAllocator
    from minisgl.stage3.page_table import PageTable
    from minisgl.stage5.scheduler import Scheduler

_NAMES = ("row_pages", "free_pages", "evict")


@dataclass(frozen=True)
class PageSnapshot:
    """The pool at one moment. num_pages: without the dummy page, and free ones included."""

    num_pages: int
    rows: dict[int, list[int]]  # uid -> its pages, in the order of its tokens
    cached: frozenset[int] = frozenset()  # held by the prefix cache, whether or not a row uses them too
    time: float | None = None  # seconds

    def owners(self) -> dict[int, list[int]]:
        """page -> the uids whose rows have it, lowest first."""
        found: dict[int, list[int]] = {}
        for uid in sorted(self.rows):
            for page in self.rows[uid]:
                found.setdefault(page, []).append(uid)
        return found

    @property
    def num_shared(self) -> int:
        return sum(1 for uids in self.owners().values() if len(uids) > 1)

    @property
    def num_free(self) -> int:
        return self.num_pages - len(self.cached | self.owners().keys())


def snapshot_pages(
    table: PageTable, allocator: PageAllocator, reqs: Sequence[Req], time: float | None = None
) -> PageSnapshot:
    """The pool now. reqs: all that hold a row, after their lengths have advanced and before they are freed."""
    rows = {req.uid: table.pages(req.table_idx, 0, req.cached_len).tolist() for req in reqs if req.cached_len}
    held = {page for pages in rows.values() for page in pages}
    free = set(allocator.free_pages().tolist())
    cached = frozenset(set(range(allocator.num_pages)) - free - held)
    return PageSnapshot(allocator.num_pages, rows, cached, time)


def snapshot_scheduler(scheduler: Scheduler, time: float | None = None) -> PageSnapshot:
    """The pool now, between two steps of a scheduler of stage 5 or later."""
    half_done = scheduler.prefill.half_done
    reqs = [*([half_done] if half_done else []), *scheduler.decode.running.values()]
    return snapshot_pages(scheduler.cache.table, scheduler.cache.allocator, reqs, time)


def page_snapshots(events: Sequence[Event], num_pages: int | None = None) -> list[PageSnapshot]:
    """One for each moment at which something changed. num_pages: None takes what the trace's counter "pages" adds up
    to, or, without one, the highest page seen as the last. Raises ValueError when the trace does not tell of pages."""
    changes = of_one_rank(events, lambda event: event.name in _NAMES)
    if not any(event.name == "row_pages" for event in changes):
        raise ValueError('the trace does not tell which pages a request holds: it needs "row_pages" events')
    if num_pages is None:
        counted = max((sum(event.args.values()) for event in events if _counts_pages(event)), default=0)
        num_pages = max(counted, 1 + max(page for event in changes for page in event.args.get("pages", [0])))
    rows: dict[int, list[int]] = {}
    used: set[int] = set()
    snapshots: list[PageSnapshot] = []
    for event in changes:
        pages = event.args.get("pages", [])
        if event.name == "row_pages":
            uid = event.uid or 0
            rows[uid] = rows.get(uid, [])[: event.args.get("start", 0)] + pages
            used.update(pages)
            if not rows[uid]:
                del rows[uid]
        else:
            used.difference_update(pages)
        held = {page for pages in rows.values() for page in pages}
        now = PageSnapshot(
            num_pages, {u: list(p) for u, p in rows.items()}, frozenset(used - held), seconds(events, event.ts)
        )
        snapshots.append(now)
    return snapshots


def _counts_pages(event: Event) -> bool:
    return event.phase == "C" and event.name == "pages"
