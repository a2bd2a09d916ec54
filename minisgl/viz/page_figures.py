"""The pool over time and at one moment, a colour for each request, and how full it is. From pages.py and counters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from minisgl.core.trace import Event
from minisgl.viz import units
from minisgl.viz.pages import PageSnapshot
from minisgl.viz.reading import of_one_rank, seconds
from minisgl.viz.style import (
    GREY,
    HATCH,
    PALE,
    PALETTE,
    Size,
    few_ticks,
    fit_labels,
    legend,
    new_figure,
    request_color,
    request_entries,
    styled,
    swatch,
    text_on,
)

CACHED = "#A9A9A9"
FEW = 32  # pages: of so many, or of twice as many as were used, all are shown


@styled
def page_map(snapshots: Sequence[PageSnapshot], *, title: str | None = None, size: Size = "notebook") -> Figure:
    """Each page a line, each snapshot a column; a page in several rows is hatched, in the colour of the first. Where
    more than half of the pages lie above all that were ever used, they are left out, and the axis says so."""
    if not snapshots:
        raise ValueError("there is no snapshot to draw: take one after each step")
    finding = title or _map_finding(snapshots)
    snapshots = _long_enough(snapshots)
    edges, xlabel = _edges(snapshots)
    num_pages = snapshots[-1].num_pages
    used = 1 + max((page for snapshot in snapshots for page in (*snapshot.owners(), *snapshot.cached)), default=0)
    lines = num_pages if num_pages <= 2 * max(used, FEW) else used
    colors = np.ones((lines, len(snapshots), 3))
    shared = np.zeros((lines, len(snapshots)), dtype=bool)
    for column, snapshot in enumerate(snapshots):
        for page in snapshot.cached:
            colors[page, column] = to_rgb(CACHED)
        for page, uids in snapshot.owners().items():
            colors[page, column] = to_rgb(request_color(uids[0]))
            shared[page, column] = len(uids) > 1
    figure, (axes,) = new_figure(size, finding)
    borders = np.arange(lines + 1) - 0.5
    axes.pcolormesh(edges, borders, colors)
    for page, several in enumerate(shared):
        runs = [(edges[i], edges[i + 1] - edges[i]) for i in np.flatnonzero(several)]
        axes.broken_barh(runs, (page - 0.5, 1), facecolor="none", hatch=HATCH, edgecolor="white", linewidth=0)
    axes.set_ylim(lines - 0.5, -0.5)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel(xlabel)
    axes.set_ylabel("page" if lines == num_pages else f"page ({lines:,} to {num_pages - 1:,} stay free)")
    few_ticks(axes.xaxis, whole=snapshots[0].time is None)
    few_ticks(axes.yaxis)
    legend(figure, size, _entries(snapshots))
    return figure


@styled
def page_grid(snapshot: PageSnapshot, *, title: str | None = None, size: Size = "notebook") -> Figure:
    """The pool at one moment, each page a box with its number."""
    columns = min(snapshot.num_pages, max(8, round((snapshot.num_pages * 2.6) ** 0.5)))
    lines = -(-snapshot.num_pages // columns)
    finding = f"{snapshot.num_free} of {units.count(snapshot.num_pages, 'page')} are free"
    if snapshot.num_shared:
        finding += f", {snapshot.num_shared} in use by more than one request"
    figure, (axes,) = new_figure(size, title or finding, tall=min(1.4, 0.3 + lines * 0.11))
    owners = snapshot.owners()
    labels: list[tuple[Text, Rectangle]] = []
    for page in range(snapshot.num_pages):
        x, y = page % columns, page // columns
        uids = owners.get(page, [])
        color = request_color(uids[0]) if uids else CACHED if page in snapshot.cached else "white"
        hatch = HATCH if len(uids) > 1 else None
        box = Rectangle(
            (x - 0.46, y - 0.44), 0.92, 0.88, facecolor=color, edgecolor="white" if hatch else PALE, hatch=hatch
        )
        axes.add_patch(box)
        back = {"facecolor": color, "edgecolor": "none", "pad": 1.0} if hatch else None
        labels.append((axes.text(x, y, str(page), ha="center", va="center", color=text_on(color), bbox=back), box))
    axes.set_xlim(-0.6, columns - 0.4)
    axes.set_ylim(lines - 0.4, -0.6)
    axes.set_axis_off()
    legend(figure, size, _entries([snapshot]))
    fit_labels(figure, [labels])
    return figure


def _entries(snapshots: Sequence[PageSnapshot]) -> list[tuple[str, Artist]]:
    entries = request_entries([uid for snapshot in snapshots for uid in snapshot.rows])
    if any(snapshot.num_shared for snapshot in snapshots):
        entries.append(("in several rows", swatch(GREY, hatch=HATCH, edgecolor="white")))
    if any(snapshot.cached for snapshot in snapshots):
        entries.append(("in the prefix cache only", swatch(CACHED)))
    return [*entries, ("free", swatch("white", edgecolor=GREY))]


def _long_enough(snapshots: Sequence[PageSnapshot]) -> list[PageSnapshot]:
    """To be seen. Between the two events of one step, say, pages are in no row and not yet free."""
    last = snapshots[-1].time or 0.0
    shortest = (last - (snapshots[0].time or 0.0)) / 2000
    nexts = [*(snapshot.time or 0.0 for snapshot in snapshots[1:]), last + 1.0]
    pairs = zip(snapshots, nexts, strict=True)
    return [now for now, after in pairs if now.time is None or after - now.time >= shortest]


def _edges(snapshots: Sequence[PageSnapshot]) -> tuple[np.ndarray, str]:
    """Of the columns: the moments, or the numbers of the snapshots. The last lasts as long as the others on average."""
    times = [snapshot.time for snapshot in snapshots if snapshot.time is not None]
    if len(times) < len(snapshots):
        return np.arange(len(snapshots) + 1), "snapshot"
    last = (times[-1] - times[0]) / len(times) or 1e-3
    unit = units.time_unit(times[-1] + last)
    return np.array([*times, times[-1] + last]) / unit.scale, f"time ({unit.name})"


def _map_finding(snapshots: Sequence[PageSnapshot]) -> str:
    least = min(snapshot.num_free for snapshot in snapshots)
    shared = max(snapshot.num_shared for snapshot in snapshots)
    requests = len({uid for snapshot in snapshots for uid in snapshot.rows})
    pages = units.count(snapshots[-1].num_pages, "page")
    text = f"{units.count(requests, 'request')} in {pages}: never fewer than {least:,} free"
    return text + (f", up to {shared} shared" if shared else "")


@styled
def page_usage(events: Sequence[Event], *, title: str | None = None, size: Size = "notebook") -> Figure:
    """How many pages are in rows, in the prefix cache (locked or not), and free. From the counter "pages"."""
    counts = of_one_rank(events, lambda event: event.phase == "C" and event.name == "pages")
    if not counts:
        raise ValueError('the trace has no counter "pages": stages 3 and later record it')
    looks = {
        "rows": ("held by rows alone", PALETTE[0], None),
        "protected": ("in the prefix cache, locked", PALETTE[2], None),
        "evictable": ("in the prefix cache, evictable", CACHED, HATCH),
        "free": ("free", "white", None),
    }
    names = [name for name in looks if any(name in event.args for event in counts)]
    times = [seconds(events, event.ts) for event in counts]
    unit = units.time_unit(times[-1])
    values = [[event.args.get(name, 0) for event in counts] for name in names]
    total = max(sum(column) for column in zip(*values, strict=True))
    low = min(values[-1])
    pages = f"{low:,} of {units.count(total, 'page')}"
    if "rows" not in names:  # a count of free pages only: how many more there are is not known
        names, values, pages = ["rows", *names], [[total - n for n in values[0]], *values], units.count(low, "page")
    figure, (axes,) = new_figure(size, title or f"{pages} are free when the pool is fullest")
    xs = [time / unit.scale for time in times]
    base = np.zeros(len(xs))
    for name, column in zip(names, values, strict=True):
        _, color, hatch = looks[name]
        top = base + np.array(column)
        axes.fill_between(xs, base, top, step="post", facecolor=color, hatch=hatch, edgecolor="white", linewidth=0)
        base = top
    axes.set_xlim(xs[0], xs[-1])
    most = total - low
    shown = total if most * 20 >= total or not most else most * 1.25  # a large pool's free pages would hide the rest
    axes.set_ylim(0, shown)
    axes.set_xlabel(f"time ({unit.name})")
    axes.set_ylabel("pages" if shown == total else f"pages, of {total:,}")
    few_ticks(axes.xaxis, whole=False)
    few_ticks(axes.yaxis)
    entries = [
        (looks[n][0], swatch(looks[n][1], hatch=looks[n][2], edgecolor=GREY if n == "free" else "white")) for n in names
    ]
    legend(figure, size, [*entries])
    return figure
