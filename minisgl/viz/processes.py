"""The server's processes and one request's way through them. From the messages of a trace of stage 8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minisgl.core.trace import Event
from minisgl.viz import units
from minisgl.viz.reading import request_spans, seconds
from minisgl.viz.requests import THIN, state_entries
from minisgl.viz.style import GREY, HATCH, INK, PALE, Size, few_ticks, legend, new_figure, request_color, styled

STATIONS = ("API", "tokenizer", "scheduler", "detokenizer")
# Who sends a message, and to whom: stations by number. A trace has the sender's process with each.
# The tokenizer hands an Abort on, and the scheduler a Rejected.
ROUTES = {
    "Tokenize": ((0, 1),),
    "Generate": ((1, 2),),
    "Abort": ((0, 1), (1, 2)),
    "Rejected": ((1, 2), (2, 3)),
    "Step": ((2, 3),),
    "Replies": ((3, 0),),
}
_WIDTH, _STRIDE = 0.15, 0.283


class _Hop(NamedTuple):
    event: Event
    route: tuple[int, int]


@styled
def journey(
    events: Sequence[Event], uid: int | None = None, *, title: str | None = None, size: Size = "notebook"
) -> Figure:
    """Above, the processes and how many messages went which way; below, when, and what the scheduler made of it.
    uid: None takes the first request of the trace."""
    messages = [e for e in events if e.phase == "i" and e.track == "messages" and e.uid is not None]
    uids = sorted({event.uid for event in messages if event.uid is not None})
    if not uids:
        raise ValueError("the trace has no messages: record it with stage 8")
    uid = uids[0] if uid is None else uid
    if uid not in uids:
        raise ValueError(f"the trace has no request {uid}: it has {uids[0]} to {uids[-1]}")
    own = _hops([event for event in messages if event.uid == uid and event.name in ROUTES])
    figure, (above, below) = new_figure(size, title or _finding(own, uid), 2, 1.25, height_ratios=[2, 3])
    senders = {hop.route[0]: f"{hop.event.role} {hop.event.rank}" for hop in own}
    _map(above, Counter((hop.event.name, hop.route) for hop in own), senders, request_color(uid))
    states = _sequence(below, events, own, uid)
    legend(figure, size, state_entries(states))
    return figure


def _hops(messages: Sequence[Event]) -> list[_Hop]:
    """A message that is handed on takes its routes in their order."""
    seen: Counter[str] = Counter()
    hops: list[_Hop] = []
    for event in messages:
        routes = ROUTES[event.name]
        hops.append(_Hop(event, routes[min(seen[event.name], len(routes) - 1)]))
        seen[event.name] += 1
    return hops


def _map(axes: Axes, counts: Counter[tuple[str, tuple[int, int]]], senders: dict[int, str], color: str) -> None:
    for station, name in enumerate(STATIONS):
        x = station * _STRIDE
        style = "round,pad=0,rounding_size=0.02"
        axes.add_patch(FancyBboxPatch((x, 0.45), _WIDTH, 0.45, boxstyle=style, facecolor=PALE, edgecolor=GREY))
        axes.text(x + _WIDTH / 2, 0.76, name, ha="center", va="center")
        axes.text(x + _WIDTH / 2, 0.57, senders.get(station, ""), ha="center", va="center", color=GREY)
    for station in range(3):
        names = [f"{number} {name}" for (name, route), number in counts.items() if route == (station, station + 1)]
        x = station * _STRIDE + _WIDTH
        _arrow(axes, (x, 0.6), (x + _STRIDE - _WIDTH, 0.6), color if names else PALE)
        label = "\n".join(names)
        axes.text(x + (_STRIDE - _WIDTH) / 2, 0.72, label, ha="center", va="bottom")
    left, right = _WIDTH / 2, 3 * _STRIDE + _WIDTH / 2
    axes.plot([right, right, left], [0.45, 0.2, 0.2], color=color, linewidth=1.8)
    _arrow(axes, (left, 0.2), (left, 0.45), color)
    axes.text((left + right) / 2, 0.17, f"{counts['Replies', (3, 0)]} Replies", ha="center", va="top")
    axes.set_xlim(-0.01, 3 * _STRIDE + _WIDTH + 0.01)
    axes.set_ylim(0, 1)
    axes.set_axis_off()


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=14, shrinkA=0, shrinkB=0, color=color, linewidth=1.8
        )
    )


def _sequence(axes: Axes, events: Sequence[Event], own: Sequence[_Hop], uid: int) -> set[str]:
    """A lane for each station; a message is an upright line from its sender to its reader. Returns the states drawn."""
    start, end = seconds(events, own[0].event.ts), seconds(events, own[-1].event.ts)
    unit = units.time_unit(end - start)
    color = request_color(uid)
    for event, (sender, reader) in own:
        x = (seconds(events, event.ts) - start) / unit.scale
        reader = reader or len(STATIONS)  # the answer arrives at the last lane, which is the API's again
        axes.plot([x, x], [sender, reader], color=INK, linewidth=0.9)
        axes.plot([x], [reader], marker="v", color=INK, markersize=5, clip_on=False)
    states: set[str] = set()
    for span in request_spans(events):
        if span.uid == uid:
            left, width = (span.start - start) / unit.scale, (span.end - span.start) / unit.scale
            hatch = HATCH if span.state == "prefill" else None
            axes.barh(2, width, 0.5 * THIN.get(span.state, 1), left=left, color=color, hatch=hatch, linewidth=0)
            states.add(span.state)
    lanes = [*STATIONS, "API"]
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.6, -0.4)
    axes.set_xlim(-0.01 * (end - start) / unit.scale, 1.01 * (end - start) / unit.scale)
    axes.set_xlabel(f"time since the request was sent ({unit.name})")
    axes.grid(axis="y")
    axes.tick_params(axis="y", length=0)
    few_ticks(axes.xaxis, whole=False)
    return states


def _finding(own: Sequence[_Hop], uid: int) -> str:
    times: dict[str, int] = {}
    for event, _ in own:
        times.setdefault(event.name, event.ts)
    start = own[0].event.ts
    text = f"Request {uid}: "
    if "Generate" in times:
        text += f"{units.duration((times['Generate'] - start) / 1e9)} to the scheduler, "
    if "Replies" in times:
        text += f"{units.duration((times['Replies'] - start) / 1e9)} to the first answer, "
    return (
        text + f"{units.duration((own[-1].event.ts - start) / 1e9)} to the last of {units.count(len(own), 'message')}"
    )
