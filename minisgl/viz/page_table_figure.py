"""From a request's tokens to its slots to the pages of the pool. From a live page table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.text import Text

from minisgl.viz import units
from minisgl.viz.style import (
    GREY,
    HATCH,
    LOOKS,
    PALE,
    Size,
    fit_labels,
    legend,
    new_figure,
    request_color,
    styled,
    swatch,
    text_on,
)

if TYPE_CHECKING:
    from minisgl.core.req import Req
    from minisgl.stage3.page_table import PageTable

MOST_PAGES = 40
_TOP, _POOL = 3.0, 0.0  # of the two lines of boxes


class _Entry(NamedTuple):
    """A page of a row: where it is drawn, its tokens [start, end), and the page that holds them."""

    uid: int
    x: float
    start: int
    end: int
    page: int


@styled
def page_table(
    table: PageTable, reqs: Sequence[Req], num_pages: int, *, title: str | None = None, size: Size = "notebook"
) -> Figure:
    """reqs: those with a row, after a step. num_pages: of the pool. Raises ValueError for more than can be drawn."""
    reqs = [req for req in reqs if req.cached_len]
    entries = _entries(table, reqs)
    if not entries or max(num_pages, len(entries)) > MOST_PAGES:
        drawn = f"{len(entries)} pages in rows and {num_pages} in the pool"
        raise ValueError(f"{drawn}: at least 1 and at most {MOST_PAGES} can be drawn; page_map shows large pools")
    width = max(entries[-1].x + 1, num_pages)
    figure, (axes,) = new_figure(size, title or _finding(table, reqs, entries), tall=0.75)
    font = min(LOOKS[size].font, (LOOKS[size].width - 1.1) / width * 72 / 3.6)
    shift = (width - num_pages) / 2, (width - entries[-1].x - 1) / 2
    owners: dict[int, list[int]] = {}
    labels: list[tuple[Text, Rectangle]] = []
    for entry in entries:
        owners.setdefault(entry.page, []).append(entry.uid)
        color, x = request_color(entry.uid), entry.x + shift[1]
        box = _box(axes, x, _TOP, color)
        first = entry.page * table.page_size
        labels.append((_text(axes, x, _TOP, _range(first, first + entry.end - entry.start), text_on(color), font), box))
        above = _box(axes, x, _TOP + 0.9, "white")
        labels.append((_text(axes, x, _TOP + 0.9, _range(entry.start, entry.end), GREY, font), above))
        _curve(axes, x, entry.page + shift[0], color, LOOKS[size].font / 7)
    for page in range(num_pages):
        uids = owners.get(page, [])
        color = request_color(uids[0]) if uids else "white"
        box = _box(axes, page + shift[0], _POOL, color, hatch=HATCH if len(uids) > 1 else None)
        back = {"facecolor": color, "edgecolor": "none", "pad": 1} if uids else None
        label = _text(axes, page + shift[0], _POOL, str(page), text_on(color) if uids else GREY, font)
        label.set_bbox(back)
        labels.append((label, box))
    axes.set_xlim(-0.6, width - 0.4)
    axes.set_ylim(_POOL - 0.6, _TOP + 1.5)
    axes.set_yticks([_TOP + 0.9, _TOP, _POOL], ["tokens", "slots", "pages"])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    keys = [(f"request {req.uid}, row {req.table_idx}", swatch(request_color(req.uid))) for req in reqs]
    legend(figure, size, [*keys, ("free", swatch("white", edgecolor=GREY))])
    fit_labels(figure, [labels])
    return figure


def _entries(table: PageTable, reqs: Sequence[Req]) -> list[_Entry]:
    found: list[_Entry] = []
    x = 0.0
    for req in reqs:
        for index, page in enumerate(table.pages(req.table_idx, 0, req.cached_len).tolist()):
            start = index * table.page_size
            found.append(_Entry(req.uid, x, start, min(start + table.page_size, req.cached_len), page))
            x += 1
        x += 0.5
    return found


def _box(axes: Axes, x: float, y: float, color: str, hatch: str | None = None) -> Rectangle:
    edge = "white" if hatch else GREY if color == "white" else "white"
    box = Rectangle((x - 0.47, y - 0.4), 0.94, 0.8, facecolor=color, edgecolor=edge, hatch=hatch, linewidth=0.6)
    if color == "white":
        box.set_edgecolor(PALE)
    axes.add_patch(box)
    return box


def _text(axes: Axes, x: float, y: float, text: str, color: str, font: float) -> Text:
    return axes.text(x, y, text, ha="center", va="center", color=color, fontsize=font)


def _curve(axes: Axes, x: float, page: float, color: str, width: float) -> None:
    start, end = _TOP - 0.42, _POOL + 0.42
    middle = (start + end) / 2
    path = Path([(x, start), (x, middle), (page, middle), (page, end)], [Path.MOVETO, *[Path.CURVE4] * 3])
    axes.add_patch(PathPatch(path, facecolor="none", edgecolor=color, linewidth=width))


def _range(start: int, end: int) -> str:
    return f"{start}" if end - start == 1 else f"{start}–{end - 1}"


def _finding(table: PageTable, reqs: Sequence[Req], entries: Sequence[_Entry]) -> str:
    shared = len(entries) - len({entry.page for entry in entries})
    scattered = sum(1 for a, b in pairwise(entries) if a.uid == b.uid and b.page != a.page + 1)
    text = f"{units.count(len(reqs), 'request')} in pages of {units.count(table.page_size, 'slot')}"
    text += f": {scattered} times the next page is somewhere else" if scattered else ": each in pages side by side"
    return text + (f", {units.count(shared, 'page')} shared" if shared else "")
