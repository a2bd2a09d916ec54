"""What ranks compute and where they meet, layer by layer, as it was. From traces of `record-trace layers`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minisgl.core.trace import Event
from minisgl.viz import units
from minisgl.viz.reading import end_of
from minisgl.viz.style import GREY, INK, PALE, PALETTE, WARNING, Size, few_ticks, legend, new_figure, styled, swatch

_COLORS = {"attention": PALETTE[0], "mlp": PALETTE[2], "embedding": GREY, "head": GREY, "all": PALETTE[0]}
_TRANSFER = PALETTE[3]
PARTS = ("compute", "communication", "wait for another rank", "no kernel runs")


def step_parts(events: Sequence[Event]) -> dict[str, float]:
    """Seconds of a step for each of PARTS, the mean of the ranks: for `time_parts`. Communication is what a meeting
    takes the rank that comes to it last; what it takes the others longer is a wait. Several ranks' steps count from the
    end of their first meeting, that of the embeddings: until then they began when their hosts came to it."""
    ranks = [[span for span in spans if span.args["part"] != "embedding"] for spans in _ranks(events)]
    found = dict.fromkeys(PARTS, 0.0)
    for spans in ranks:
        whole = end_of(spans[-1]) - spans[0].ts
        compute = sum(span.args["busy_ns"] for span in spans if span.name == "compute")
        meetings = sum(span.duration or 0 for span in spans if span.name != "compute")
        transfer = sum(_transfers(ranks))
        parts = (compute, transfer, meetings - transfer, whole - compute - meetings)
        for name, part in zip(PARTS, parts, strict=True):
            found[name] += part / len(ranks) / 1e9
    return found


@styled
def recorded_layers(
    events: Sequence[Event],
    *,
    first: int | None = None,
    count: int = 2,
    title: str | None = None,
    size: Size = "notebook",
) -> Figure:
    """A lane for each rank. first: the first layer drawn, from 0 (None: from the middle). count: how many."""
    ranks = _ranks(events)
    num_layers = 1 + max(span.args.get("layer", -1) for span in ranks[0])
    begin = (num_layers - count) // 2 if first is None else first
    if begin < 0 or begin + count > num_layers:
        raise ValueError(f"layers {begin} to {begin + count - 1} are not among the {num_layers} of the trace")
    shown = [[span for span in spans if begin <= span.args.get("layer", -1) < begin + count] for spans in ranks]
    start, end = min(spans[0].ts for spans in shown), max(end_of(spans[-1]) for spans in shown)
    unit = units.time_unit((end - start) / 1e9)
    heading = title or _finding(ranks, num_layers)
    figure, (axes,) = new_figure(size, heading, tall=min(1.3, 0.5 + 0.09 * len(ranks)))
    transfers = _transfers(ranks)
    for rank, spans in enumerate(shown):
        before = [span for span in ranks[rank] if span.name != "compute" and span.ts < spans[0].ts]
        _draw_rank(axes, spans, transfers[len(before) :], rank, start, unit.scale * 1e9)
    axes.set_xlim(0, 1.01 * (end - start) / 1e9 / unit.scale)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time ({unit.name}), layers {begin} to {begin + count - 1}")
    few_ticks(axes.xaxis, whole=False)
    entries = [("attention", swatch(_COLORS["attention"])), ("MLP", swatch(_COLORS["mlp"]))]
    entries += [("all-reduce", swatch(_TRANSFER)), ("waits in it for another rank", swatch(PALE, hatch="////"))]
    legend(figure, size, [*entries, ("no kernel runs", swatch(WARNING, alpha=0.28))])
    return figure


def _draw_rank(
    axes: Axes, spans: Sequence[Event], transfers: Sequence[int], lane: int, start: int, scale: float
) -> None:
    """transfers: of the meetings among the spans, in order. scale: nanoseconds of one unit of the axis."""
    left, right = (spans[0].ts - start) / scale, (end_of(spans[-1]) - start) / scale
    axes.broken_barh([(left, right - left)], (lane - 0.4, 0.8), facecolor=WARNING, alpha=0.28)
    waiting = iter(transfers)
    for span in spans:
        at, length = (span.ts - start) / scale, (span.duration or 0) / scale
        if span.name == "compute":
            axes.barh(lane, length, 0.8, left=at, color=_COLORS[span.args["part"]])
            continue
        transfer = next(waiting) / scale
        axes.barh(lane, length - transfer, 0.8, left=at, color=PALE, hatch="////", edgecolor=INK, linewidth=0)
        axes.barh(lane, transfer, 0.8, left=at + length - transfer, color=_TRANSFER)


def _ranks(events: Sequence[Event]) -> list[list[Event]]:
    """The device's spans of each rank, one after another: a kernel that was launched early begins when the one before
    it ends. Raises ValueError when they are not of one step."""
    found: defaultdict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.ts):
        if event.track == "device" and "busy_ns" in event.args:
            earlier = found[event.rank]
            begin = max(event.ts, end_of(earlier[-1])) if earlier else event.ts
            length = max(0, end_of(event) - begin)
            busy = {**event.args, "busy_ns": min(event.args["busy_ns"], length)}
            earlier.append(replace(event, ts=begin, duration=length, args=busy))
    if not found or len({tuple(span.name for span in spans) for spans in found.values()}) != 1:
        raise ValueError("the trace has no layers: record it with python -m minisgl.benchmark record-trace layers")
    return [found[rank] for rank in sorted(found)]


def _transfers(ranks: Sequence[Sequence[Event]]) -> list[int]:
    """Nanoseconds of each meeting for the rank that came to it last."""
    meetings = [[span.duration or 0 for span in spans if span.name != "compute"] for spans in ranks]
    return [min(same) for same in zip(*meetings, strict=True)]


def _finding(ranks: Sequence[Sequence[Event]], num_layers: int) -> str:
    parts = step_parts([span for spans in ranks for span in spans if "layer" in span.args])
    each = {name: units.duration(seconds / num_layers) for name, seconds in parts.items()}
    return (
        f"A layer on {units.count(len(ranks), 'rank')}: {each['compute']} of work, {each['communication']} of "
        f"communication, {each['wait for another rank']} of waiting for each other"
    )
