"""What scheduler and engine do at the same time, and where the engine has nothing to do. From traces.

Where a trace has a device's own times (a simulated device has, and what `record-trace` records of a GPU), these are
drawn instead of the engine's: on a GPU an engine's span is how long the host launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minisgl.core.trace import Event
from minisgl.viz import units
from minisgl.viz.reading import PHASES, end_of
from minisgl.viz.style import GREY, HATCH, PALE, PALETTE, WARNING, Size, few_ticks, legend, new_figure, styled, swatch

MOST_STEPS = 16  # in one picture, unless asked for more
_ENGINE = ("device", "engine")  # the better first
_COLORS = {"schedule": PALETTE[2], "launch": PALETTE[4], "commit": PALETTE[3], "wait": PALE}
_COLORS |= {"decode": PALETTE[0], "prefill": PALETTE[1], "mixed": PALETTE[5], "forward": GREY}


class _Rank(NamedTuple):
    """Of one process, in the window that is drawn. Nanoseconds."""

    name: str
    start: int
    scheduler: list[Event]
    engine: list[Event]
    phases: list[str]  # of the engine's steps
    track: str  # of these

    @property
    def bubbles(self) -> list[tuple[int, int]]:
        """(start, length) of each moment without a step, between the first step and the last."""
        pairs = zip(self.engine, self.engine[1:], strict=False)
        return [(end_of(a), b.ts - end_of(a)) for a, b in pairs if b.ts > end_of(a)]

    @property
    def waiting(self) -> float:
        """The bubbles' share of the time."""
        total = end_of(self.engine[-1]) - self.engine[0].ts
        return sum(length for _, length in self.bubbles) / total if total else 0.0


@styled
def timeline(
    events: Sequence[Event] | Mapping[str, Sequence[Event]],
    *,
    first: int | None = None,
    count: int = MOST_STEPS,
    title: str | None = None,
    size: Size = "notebook",
) -> Figure:
    """Two lanes a rank, the engine's bubbles shaded. events: of one run, or of several by name, to compare on one
    scale. first: the first step drawn, from 1 (None: from the middle of the run). count: how many."""
    runs = dict(events) if isinstance(events, Mapping) else {"": events}
    ranks = {name: _ranks(run, first, count) for name, run in runs.items()}
    lanes = sum(2 * len(found) for found in ranks.values())
    tall = min(1.7, 0.42 + 0.13 * lanes)
    figure, rows = new_figure(size, title or _finding(ranks), len(runs), tall, sharex=True)
    longest = max(end_of(found[0].engine[-1]) - found[0].start for found in ranks.values()) / 1e9
    unit = units.time_unit(longest)
    seen: dict[str, None] = {}
    for axes, (name, found) in zip(rows, ranks.items(), strict=True):
        start = min(rank.start for rank in found)
        for index, rank in enumerate(found):
            seen |= dict.fromkeys(_draw_rank(axes, rank, 2 * index, start, unit.scale * 1e9))
        labels = [f"{rank.name}{lane}" for rank in found for lane in ("scheduler", rank.track)]
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlim(0, longest / unit.scale)
        axes.tick_params(axis="y", length=0)
        if name:
            axes.set_title(name)
    rows[-1].set_xlabel(f"time ({unit.name})")
    few_ticks(rows[-1].xaxis, whole=False)
    order = [name for name in _COLORS if name in seen]
    entries = [(name, swatch(_COLORS[name], hatch=HATCH if name == "prefill" else None)) for name in order]
    bubble = f"bubble: the {_worker(ranks)} has nothing to do"
    legend(figure, size, [*entries, (bubble, swatch(WARNING, alpha=0.28))])
    return figure


def _ranks(events: Sequence[Event], first: int | None, count: int) -> list[_Rank]:
    """Those with an engine, each cut to the same steps."""
    spans = [event for event in events if event.phase == "X" and event.track in ("scheduler", *_ENGINE)]
    ids = sorted({(event.rank, event.role) for event in spans if event.track in _ENGINE})
    if not ids:
        raise ValueError('the trace has no step: it needs spans on the track "engine"')
    ranks: list[_Rank] = []
    for key in ids:
        own = [event for event in spans if (event.rank, event.role) == key]
        track = next(name for name in _ENGINE if any(event.track == name for event in own))
        engine = [event for event in own if event.track == track]
        begin = max(0, len(engine) - count) // 2 if first is None else first - 1
        shown = engine[begin : begin + count]
        if begin < 0 or not shown:
            raise ValueError(f"first must be from 1 to {len(engine)}, not {first}")
        before = end_of(engine[begin - 1]) if begin else min(own[0].ts, shown[0].ts)
        scheduler = [e for e in _on_host(own, track) if e.ts < end_of(shown[-1]) and end_of(e) > before]
        plans = {event.args.get("step"): event.args for event in own if event.name == "schedule"}
        phases = [_phase(event, plans, number) for number, event in enumerate(shown, start=begin + 1)]
        ranks.append(_Rank(f"rank {key[0]} " if len(ids) > 1 else "", before, scheduler, shown, phases, track))
    return ranks


def _on_host(own: Sequence[Event], track: str) -> list[Event]:
    """What the thread that schedules does: with a device's own times also the engine's spans, which are launches."""
    scheduler = [event for event in own if event.track == "scheduler"]
    if track == "engine" or any(event.name == "launch" for event in scheduler):
        return scheduler
    launches = [replace(event, name="launch") for event in own if event.track == "engine"]
    return sorted([*scheduler, *launches], key=lambda event: event.ts)


def _phase(step: Event, plans: Mapping[Any, Mapping[str, Any]], number: int) -> str:
    """What its own name says, or its arguments, or the plan that was made for it: of its number, if it has none."""
    if step.name in PHASES:
        return step.name
    return step.args.get("phase") or plans.get(step.args.get("step", number), {}).get("phase") or "forward"


def _draw_rank(axes: Axes, rank: _Rank, lane: int, start: int, scale: float) -> list[str]:
    """Returns the kinds of spans that were drawn. scale: nanoseconds of one unit of the axis."""
    bubbles = [((at - start) / scale, length / scale) for at, length in rank.bubbles]
    axes.broken_barh(bubbles, (lane + 0.6, 0.8), facecolor=WARNING, alpha=0.28)
    kinds: list[str] = []
    lanes = [(0, event, event.name) for event in rank.scheduler]
    lanes += [(1, event, phase) for event, phase in zip(rank.engine, rank.phases, strict=True)]
    for offset, event, kind in lanes:
        left, width = (max(event.ts, start) - start) / scale, (end_of(event) - max(event.ts, start)) / scale
        hatch = HATCH if kind == "prefill" else None
        color = _COLORS.get(kind, GREY)
        axes.barh(
            lane + offset,
            width,
            0.8,
            left=left,
            color=color,
            edgecolor="white",
            linewidth=0.6 * offset,
            hatch=hatch,
        )
        kinds.append(kind)
    return kinds


def _finding(ranks: Mapping[str, Sequence[_Rank]]) -> str:
    shares = {name: sum(rank.waiting for rank in found) / len(found) for name, found in ranks.items()}
    if len(shares) == 1:
        (share,), (found,) = shares.values(), ranks.values()
        number = units.count(len(found[0].engine), "step")
        return f"The {_worker(ranks)} has nothing to do for {100 * share:.0f} % of the time of {number}"
    texts = [f"{100 * share:.0f} % ({name})" for name, share in shares.items()]
    return f"Time in which the {_worker(ranks)} has nothing to do: {', '.join(texts)}"


def _worker(ranks: Mapping[str, Sequence[_Rank]]) -> str:
    return "device" if all(rank.track == "device" for found in ranks.values() for rank in found) else "engine"
