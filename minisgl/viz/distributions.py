"""How a quantity is spread, and the latencies that a trace tells of. Means hide the users who waited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minisgl.core.trace import Event
from minisgl.viz import units
from minisgl.viz.reading import request_spans
from minisgl.viz.style import PALETTE, Size, few_ticks, legend, new_figure, styled

ARRIVED, ANSWERED = ("Tokenize",), ("Reply", "Replies")
_DASHES = ("-", "--", ":", "-.")


@styled
def distribution(
    samples: Mapping[str, Sequence[float]],
    *,
    quantity: str = "latency",
    histogram: bool = False,
    title: str | None = None,
    size: Size = "notebook",
) -> Figure:
    """Share of the samples that are at most x, or a histogram. samples: name -> seconds."""
    _check(samples)
    name, values = next(iter(samples.items()))
    finding = f"{quantity}: half within {_at(values, 50)}, 99 % within {_at(values, 99)}"
    if len(samples) > 1:
        finding = f"{quantity}, 99 % within: " + ", ".join(f"{_at(v, 99)} ({n})" for n, v in samples.items())
    figure, (axes,) = new_figure(size, title or finding)
    _draw(axes, samples, quantity, histogram)
    if len(samples) > 1 or name:
        lines = axes.get_legend_handles_labels()
        legend(figure, size, list(zip(lines[1], lines[0], strict=True)))
    return figure


@styled
def latency(events: Sequence[Event], *, title: str | None = None, size: Size = "notebook") -> Figure:
    """Time to first token and, where the trace has messages, time between tokens: share of requests within x."""
    first, between = latencies(events)
    panels = {"time to first token": first} | ({"time between tokens": between} if between else {})
    finding = f"Half of the requests have their first token within {_at(first, 50)}, 99 % within {_at(first, 99)}"
    figure, rows = new_figure(size, title or finding, len(panels), 0.6 + 0.35 * len(panels))
    for axes, (name, values), color in zip(rows, panels.items(), PALETTE, strict=False):
        _draw(axes, {"": values}, name, False, color)
    return figure


def latencies(events: Sequence[Event]) -> tuple[list[float], list[float]]:
    """Seconds to each request's first token, and between any two of a request's answers. Raises ValueError when the
    trace has neither messages nor requests' decode states."""
    arrived: dict[int, int] = {}
    answers: dict[int, list[int]] = {}
    names = {event.name for event in events}
    answered = next((name for name in ANSWERED if name in names), None)  # of both, the one that arrived
    for event in events:
        if event.name in ARRIVED and event.uid is not None:
            arrived.setdefault(event.uid, event.ts)
        elif event.name == answered and event.uid is not None:
            answers.setdefault(event.uid, []).append(event.ts)
    first = [(answers[uid][0] - ts) / 1e9 for uid, ts in arrived.items() if uid in answers]
    between = [(b - a) / 1e9 for times in answers.values() for a, b in pairwise(times)]
    if not first:
        spans = request_spans(events)
        begin = {span.uid: span.start for span in reversed(spans)}
        first = [span.start - begin[span.uid] for span in spans if span.state == "decode"]
    if not first:
        raise ValueError(
            "the trace does not tell when a request got its first token: it needs decode states or messages"
        )
    return first, between


def _draw(
    axes: Axes, samples: Mapping[str, Sequence[float]], quantity: str, histogram: bool, color: str | None = None
) -> None:
    unit = units.time_unit(max(max(values) for values in samples.values()))
    bins = np.linspace(0, max(max(values) for values in samples.values()) / unit.scale, 31).tolist()
    for index, (name, values) in enumerate(samples.items()):
        xs = np.sort(np.array(values)) / unit.scale
        look = color or PALETTE[index % len(PALETTE)]
        if histogram:
            axes.hist(xs, bins=bins, color=look, alpha=0.6, label=name)
        else:
            shares = 100 * np.arange(0, len(xs) + 1) / len(xs)
            xs = np.concatenate(([0.0], xs))
            axes.step(xs, shares, where="post", color=look, label=name, linestyle=_DASHES[index % len(_DASHES)])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0, top=None if histogram else 103)
    axes.set_xlabel(f"{quantity} ({unit.name})")
    axes.set_ylabel("samples" if histogram else "share within (%)")
    axes.grid()
    few_ticks(axes.xaxis, whole=False)
    few_ticks(axes.yaxis, most=6)


def _check(samples: Mapping[str, Sequence[float]]) -> None:
    for name, values in samples.items():
        if not len(values) or min(values) < 0:
            raise ValueError(f"samples of {name!r} must be times of at least 0 s, and at least one")
    if not samples:
        raise ValueError("samples is empty: give at least one name -> seconds")


def _at(values: Sequence[float], percent: float) -> str:
    return units.duration(float(np.percentile(np.array(values), percent)))
