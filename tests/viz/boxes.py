"""Finds what a reader could not read: texts over each other or outside the figure, a legend over the data."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

_SLACK = 1.0  # pixels


def problems(figure: Figure) -> list[str]:
    """Empty for a good figure."""
    figure.draw_without_rendering()
    texts = [(text.get_text(), text.get_window_extent()) for text in _texts(figure) if _is_shown(text)]
    found = [f"{name!r} leaves the figure" for name, box in texts if not _inside(box, figure.bbox)]
    for (name, box), (other, other_box) in combinations(texts, 2):
        if _overlap(box, other_box):
            found.append(f"{name!r} is over {other!r}")
    for legend in figure.legends:
        box = legend.get_window_extent()
        if not _inside(box, figure.bbox):
            found.append("the legend leaves the figure")
        found += ["the legend is over the data" for axes in figure.axes if _overlap(box, axes.bbox)]
        own = {id(text) for text in legend.get_texts()}
        rest = [text for text in _texts(figure) if _is_shown(text) and id(text) not in own]
        found += [f"the legend is over {t.get_text()!r}" for t in rest if _overlap(box, t.get_window_extent())]
    return found


def _texts(figure: Figure) -> list[Text]:
    found: list[Any] = [figure._suptitle, *figure.texts]  # type: ignore[attr-defined]
    for legend in figure.legends:
        found += legend.get_texts()
    for axes in figure.axes:
        found += [axes._left_title, axes.title, axes._right_title, *axes.texts]  # type: ignore[attr-defined]
        if axes.axison:
            found += _axis_texts(axes.xaxis) + _axis_texts(axes.yaxis)
    unique = {id(text): text for text in found if text is not None}
    return list(unique.values())


def _axis_texts(axis: Axis) -> list[Text]:
    """Ticks outside the view are not drawn."""
    low, high = sorted(axis.get_view_interval())
    margin = (high - low) * 1e-9
    ticks = [tick.label1 for tick in axis.get_major_ticks() if low - margin <= tick.get_loc() <= high + margin]
    return [*ticks, axis.label]


def _is_shown(text: Text) -> bool:
    return text.get_visible() and bool(text.get_text().strip())


def _inside(box: Bbox, outer: Bbox) -> bool:
    return (
        box.x0 >= outer.x0 - _SLACK
        and box.y0 >= outer.y0 - _SLACK
        and box.x1 <= outer.x1 + _SLACK
        and box.y1 <= outer.y1 + _SLACK
    )


def _overlap(a: Bbox, b: Bbox) -> bool:
    return min(a.x1, b.x1) - max(a.x0, b.x0) > _SLACK and min(a.y1, b.y1) - max(a.y0, b.y0) > _SLACK
