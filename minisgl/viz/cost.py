"""What tokens cost: those computed again, the time each takes, and what bounds it. From counts, times and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from minisgl.viz import units
from minisgl.viz.style import GREY, INK, LOOKS, PALE, PALETTE, Size, few_ticks, legend, new_figure, styled, swatch

_MARKERS = "osD^vP"
_DASHES = ("-", "--", ":", "-.")


class Peak(Protocol):
    """What is asked of a device: `minisgl.stage5.cost_model.Device` is one."""

    @property
    def name(self) -> str: ...

    @property
    def flops(self) -> float: ...  # a second

    @property
    def bandwidth(self) -> float: ...  # bytes a second


@styled
def cost_triangles(counts: Mapping[str, Sequence[int]], *, title: str | None = None, size: Size = "notebook") -> Figure:
    """Which positions each step computes. counts: name -> tokens computed by each step of one request alone, the
    first of which computes its prompt and each later one ends one token further."""
    if not counts or not all(len(steps) and min(steps) > 0 for steps in counts.values()):
        raise ValueError("counts must give at least one step for each name, and at least one token a step")
    figure, panels = new_figure(size, title or _triangle_finding(counts), len(counts), beside=True, sharey=True)
    colors = (PALETTE[5], *PALETTE)
    entries: list[tuple[str, Artist]] = []
    any_spared = False
    for axes, (name, steps), color in zip(panels, counts.items(), colors, strict=False):
        ends = steps[0] + np.arange(len(steps))
        spared = ends - np.array(steps)
        edges = np.arange(len(steps) + 1) + 0.5
        axes.stairs(spared, edges, fill=True, color=PALE)
        axes.stairs(ends, edges, baseline=spared, fill=True, color=color)
        entries.append((f"computed, {name}", swatch(color)))
        any_spared |= bool(spared.any())
        axes.set_title(f"{name}: {units.count(sum(steps), 'token')}")
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        few_ticks(axes.xaxis, most=5)
        few_ticks(axes.yaxis)
    panels[0].set_ylabel("position in the sequence")
    legend(figure, size, [*entries, *([("not computed again", swatch(PALE))] if any_spared else [])])
    return figure


def _triangle_finding(counts: Mapping[str, Sequence[int]]) -> str:
    totals = {name: sum(steps) for name, steps in counts.items()}
    most, least = max(totals, key=totals.__getitem__), min(totals, key=totals.__getitem__)
    if totals[most] == totals[least]:
        return f"{most} computes {units.count(totals[most], 'token')}"
    return f"{least} computes {units.count(totals[least], 'token')} where {most} computes {totals[most]:,}"


@styled
def time_per_token(
    seconds: Mapping[str, Sequence[float]], *, title: str | None = None, size: Size = "notebook"
) -> Figure:
    """How long each token of an answer took. seconds: name -> one time for each token, in order."""
    if not seconds or not all(len(times) > 1 for times in seconds.values()):
        raise ValueError("seconds must give at least two tokens for each name")
    figure, (axes,) = new_figure(size, title or _growth(seconds))
    unit = units.time_unit(max(max(times) for times in seconds.values()))
    for index, (name, times) in enumerate(seconds.items()):
        values = np.array(times) / unit.scale
        style = _DASHES[index % len(_DASHES)]
        xs, color = np.arange(1, len(values) + 1), PALETTE[index % len(PALETTE)]
        axes.plot(xs, values, "o", color=color, alpha=0.4, markeredgewidth=0, markersize=LOOKS[size].font / 3)
        axes.plot(xs[1:], _smooth(values[1:]), style, color=color, label=name)
    axes.set_xlim(0, max(len(times) for times in seconds.values()) + 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("token of the answer (dots: each; line: the median of those around it)")
    axes.set_ylabel(f"time of its step ({unit.name})")
    axes.grid()
    few_ticks(axes.xaxis)
    few_ticks(axes.yaxis, whole=False)
    legend(figure, size, [(str(line.get_label()), line) for line in axes.get_lines()[1::2]])
    return figure


def _smooth(values: np.ndarray) -> np.ndarray:
    """The median of each and its neighbours, so that one step that was disturbed does not show."""
    window = min(len(values), 2 * max(1, len(values) // 16) + 1)
    starts = [min(max(0, i - window // 2), len(values) - window) for i in range(len(values))]
    return np.array([np.median(values[start : start + window]) for start in starts])


def _growth(seconds: Mapping[str, Sequence[float]]) -> str:
    """Medians of the first and the last quarter, without the first step, which may be a prefill."""
    texts = []
    for name, times in seconds.items():
        later = np.array(times[1:])
        quarter = max(1, len(later) // 4)
        ratio = float(np.median(later[-quarter:]) / np.median(later[:quarter]))
        texts.append(f"{ratio:.1f}× as long ({name})")
    return "The last tokens, against the first, take " + ", ".join(texts)


@styled
def roofline(
    points: Mapping[str, tuple[float, float]],
    device: Peak,
    *,
    seconds: Mapping[str, float] | None = None,
    title: str | None = None,
    size: Size = "notebook",
) -> Figure:
    """points: name -> (FLOPs, bytes moved) of a step. seconds: how long it took, by the same names; a step without a
    time is drawn on the roof, which is the best it could do. Williams et al., "Roofline" (2009)."""
    if not points or not all(flops > 0 and moved > 0 for flops, moved in points.values()):
        raise ValueError("points must give at least one name -> (FLOPs, bytes), both more than 0")
    ridge = device.flops / device.bandwidth
    intensity = {name: flops / moved for name, (flops, moved) in points.items()}
    figure, (axes,) = new_figure(size, title or _bounds(intensity, ridge))
    low, high = min([*intensity.values(), ridge]) / 4, max([*intensity.values(), ridge]) * 4
    roof = Line2D([low, ridge, high], [low * device.bandwidth, device.flops, device.flops], color=INK)
    axes.add_line(roof)
    axes.axvline(ridge, color=GREY, linestyle="--")
    entries: list[tuple[str, Artist]] = [
        (f"{device.name}: {device.flops / 1e12:,.3g} TFLOP/s, {device.bandwidth / 1e9:,.4g} GB/s", roof),
        (f"ridge, {ridge:,.3g} FLOP/byte", Line2D([], [], color=GREY, linestyle="--")),
    ]
    floor = low * device.bandwidth
    for index, (name, x) in enumerate(intensity.items()):
        took = (seconds or {}).get(name)
        y = min(device.flops, x * device.bandwidth) if took is None else points[name][0] / took
        floor = min(floor, y / 2)
        look: dict[str, Any] = {
            "marker": _MARKERS[index % 6],
            "linestyle": "none",
            "color": PALETTE[index % 6],
            "zorder": 3,
        }
        (dot,) = axes.plot([x], [y], markersize=0.85 * LOOKS[size].font, **look)
        entries.append((f"{name}: {x:,.3g} FLOP/byte" + ("" if took is None else ", measured"), dot))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(floor, device.flops * 3)
    axes.set_xlabel("FLOP for each byte moved")
    axes.set_ylabel("TFLOP/s")
    axes.grid()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e12:,g}"))
    legend(figure, size, entries)
    return figure


def _bounds(intensity: Mapping[str, float], ridge: float) -> str:
    memory = [f"{name} ({x:,.3g})" for name, x in intensity.items() if x < ridge]
    arithmetic = [f"{name} ({x:,.3g})" for name, x in intensity.items() if x >= ridge]
    parts = [f"memory bounds {' and '.join(memory)}"] if memory else []
    parts += [f"arithmetic bounds {' and '.join(arithmetic)}"] if arithmetic else []
    text = "; ".join(parts) + f": the ridge is at {ridge:,.3g} FLOP/byte"
    return text[:1].upper() + text[1:]
