"""What the time of a step goes to: a bar for each way of doing it, cut into named parts. From times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minisgl.viz import units
from minisgl.viz.style import HATCH, PALETTE, WARNING, Size, few_ticks, legend, new_figure, styled

_LOSS = {"facecolor": "#F7DCC9", "edgecolor": WARNING, "hatch": HATCH, "linewidth": 0}


@styled
def time_parts(bars: Mapping[str, Mapping[str, float]], *, title: str | None = None, size: Size = "notebook") -> Figure:
    """bars: name -> part -> seconds, the same parts in each. The last part is what one would like to be rid of."""
    parts = list(next(iter(bars.values()), {}))
    if not parts or any(list(bar) != parts or min(bar.values()) < 0 or not sum(bar.values()) for bar in bars.values()):
        raise ValueError(
            f"bars must name the same parts each, in seconds of at least 0, not all 0: {dict(bars)!r:.200}"
        )
    figure, (axes,) = new_figure(size, title or _finding(bars, parts[-1]), tall=0.42 + 0.12 * len(bars))
    unit = units.time_unit(max(sum(bar.values()) for bar in bars.values()))
    looks: dict[str, dict[str, Any]] = {part: {"facecolor": PALETTE[i % 5]} for i, part in enumerate(parts)}
    looks[parts[-1]] = _LOSS
    for row, bar in enumerate(bars.values()):
        left = 0.0
        for part, seconds in bar.items():
            axes.barh(row, seconds / unit.scale, 0.6, left=left, **looks[part])
            left += seconds / unit.scale
    axes.set_yticks(range(len(bars)), list(bars))
    axes.set_xlim(0, 1.04 * max(sum(bar.values()) for bar in bars.values()) / unit.scale)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlabel(f"time ({unit.name})")
    axes.grid(axis="x")
    few_ticks(axes.xaxis, whole=False)
    entries: list[tuple[str, Artist]] = [(part, Patch(**looks[part])) for part in parts]
    legend(figure, size, entries)
    return figure


def launch_tax(
    steps: Mapping[str, tuple[float, float]], *, title: str | None = None, size: Size = "notebook"
) -> Figure:
    """steps: name -> (seconds the device computes, seconds the whole step takes). The rest is the tax: the device
    waits for the next kernel to be launched."""
    for name, (busy, whole) in steps.items():
        if not 0 <= busy <= whole:
            raise ValueError(f"{name!r} computes for {busy} s of a step of {whole} s: not possible")
    names = "the device computes", "it waits for a launch"
    bars = {name: dict(zip(names, (busy, whole - busy), strict=True)) for name, (busy, whole) in steps.items()}
    if title is None and steps:
        shares = [f"{units.share(whole - busy, whole)} ({name})" for name, (busy, whole) in steps.items()]
        title = f"Share of a step in which the device waits for launches: {', '.join(shares)}"
    return time_parts(bars, title=title, size=size)


def _finding(bars: Mapping[str, Mapping[str, float]], part: str) -> str:
    shares = [f"{units.share(bar[part], sum(bar.values()))} ({name})" for name, bar in bars.items()]
    return f"Share of {part}: {', '.join(shares)}"
