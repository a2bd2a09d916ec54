"""How many requests came out as promised, against what was asked or given. From numbers."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from minisgl.viz import units
from minisgl.viz.style import GREY, PALETTE, Size, few_ticks, legend, new_figure, styled

_MARKERS = "osD^vP"
_DASHES = ("-", "--", ":", "-.")


@styled
def goodput(
    curves: Mapping[str, Mapping[float, float]],
    *,
    offered: float | None = None,
    quantity: str = "requests that come (1/s)",
    title: str | None = None,
    size: Size = "notebook",
) -> Figure:
    """curves: name -> x -> requests a second that kept their limits. x is the requests a second that come, or any
    other quantity, of which `offered` come at each."""
    if not curves or not all(len(points) > 1 for points in curves.values()):
        raise ValueError("curves must give at least two points for each name")
    figure, (axes,) = new_figure(size, title or _finding(curves))
    for index, (name, points) in enumerate(curves.items()):
        xs = sorted(points)
        look = f"{_MARKERS[index % 6]}{_DASHES[index % 4]}"
        axes.plot(xs, [points[x] for x in xs], look, color=PALETTE[index % 6], label=name)
    most = max(max(points) for points in curves.values())
    ends = [0, most] if offered is None else [offered, offered]
    axes.add_line(Line2D([0, most], ends, color=GREY, linestyle="--", zorder=1, label="all that come"))
    axes.set_xlim(0, 1.03 * most)
    axes.set_ylim(0, 1.08 * max(*ends, *(max(points.values()) for points in curves.values())))
    axes.set_xlabel(quantity)
    axes.set_ylabel("requests in time (1/s)")
    axes.grid()
    few_ticks(axes.xaxis, whole=False)
    few_ticks(axes.yaxis, whole=False)
    legend(figure, size, [(str(line.get_label()), line) for line in axes.get_lines()])
    return figure


def _finding(curves: Mapping[str, Mapping[float, float]]) -> str:
    best = {name: max(points.values()) for name, points in curves.items()}
    return "At best in time: " + ", ".join(f"{units.count(rate)} a second ({name})" for name, rate in best.items())
