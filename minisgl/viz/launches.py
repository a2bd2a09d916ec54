"""A step's launches and the kernels that came of them: who waits for whom. From traces of `record-trace launches`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from minisgl.core.trace import Event
from minisgl.viz import units
from minisgl.viz.reading import end_of
from minisgl.viz.style import GREY, PALETTE, WARNING, Size, few_ticks, legend, new_figure, styled, swatch

_LAUNCH, _KERNEL = PALETTE[4], PALETTE[0]


class LaunchedStep(NamedTuple):
    """One step, each by start. Times in nanoseconds."""

    launches: list[Event]
    kernels: list[Event]

    @property
    def start(self) -> int:
        return self.launches[0].ts

    @property
    def lasts(self) -> float:
        """Seconds, from the first launch to the end of the last kernel."""
        return (max(map(end_of, self.kernels)) - self.start) / 1e9

    @property
    def busy(self) -> float:
        """Seconds in which kernels run."""
        return sum(end - start for start, end in self.runs()) / 1e9

    def runs(self) -> list[tuple[int, int]]:
        """(start, end) of each time in which the device has always something to do."""
        found: list[tuple[int, int]] = []
        for kernel in self.kernels:
            if found and kernel.ts <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], end_of(kernel)))
            else:
                found.append((kernel.ts, end_of(kernel)))
        return found


def launched_step(events: Sequence[Event]) -> LaunchedStep:
    """Raises ValueError when the trace has no kernels."""
    spans = sorted((event for event in events if event.phase == "X"), key=lambda event: event.ts)
    step = LaunchedStep(
        [event for event in spans if event.track == "launches"],
        [event for event in spans if event.track.startswith("stream ")],
    )
    if not step.launches or not step.kernels:
        raise ValueError("the trace has no kernels: record it with python -m minisgl.benchmark record-trace launches")
    return step


@styled
def launches(
    runs: Mapping[str, Sequence[Event]], *, most: float | None = None, title: str | None = None, size: Size = "notebook"
) -> Figure:
    """The beginning of a step of each run, on one scale. most: seconds (None: the shortest step, whole). A line leads
    from a launch to each kernel."""
    steps = {name: launched_step(events) for name, events in runs.items()}
    most = most or 1.03 * min(step.lasts for step in steps.values())
    figure, rows = new_figure(size, title or _finding(steps), len(steps), 0.45 + 0.27 * len(steps), sharex=True)
    unit = units.time_unit(most)
    for axes, (name, step) in zip(rows, steps.items(), strict=True):
        _draw(axes, step, most, unit.scale * 1e9)
        axes.set_yticks((0, 1), ("host", "device"))
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, most / unit.scale)
        axes.set_ylim(1.5, -0.5)
        axes.set_title(f"{name}: {_count(step)}" if name else _count(step))
    rows[-1].set_xlabel(f"time since the step's first launch ({unit.name})")
    few_ticks(rows[-1].xaxis, whole=False)
    entries = [("a launch", swatch(_LAUNCH)), ("a kernel", swatch(_KERNEL))]
    legend(figure, size, [*entries, ("the device has nothing to do", swatch(WARNING, alpha=0.28))])
    return figure


def _draw(axes: Axes, step: LaunchedStep, most: float, scale: float) -> None:
    """scale: nanoseconds of one unit of the axis."""

    def boxes(spans: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
        return [((at - step.start) / scale, (end - at) / scale) for at, end in spans if at < step.start + most * 1e9]

    axes.broken_barh([(0, min(most, step.lasts) * 1e9 / scale)], (0.7, 0.6), facecolor=WARNING, alpha=0.28)
    axes.broken_barh(boxes(step.runs()), (0.7, 0.6), facecolor="white")
    for lane, events, color in ((0, step.launches, _LAUNCH), (1, step.kernels, _KERNEL)):
        spans = boxes([(event.ts, end_of(event)) for event in events])
        axes.broken_barh(spans, (lane - 0.3, 0.6), facecolor=color, edgecolor="white", linewidth=0.3)
    asked = {launch.args["launch"]: (launch.ts - step.start) / scale for launch in step.launches}
    ways = [((asked[k.args["launch"]], 0.3), ((k.ts - step.start) / scale, 0.7)) for k in step.kernels]
    axes.add_collection(LineCollection(ways, colors=GREY, linewidths=0.4, clip_on=True))


def _count(step: LaunchedStep) -> str:
    return f"{units.count(len(step.launches), 'launch', 'launches')}, {units.count(len(step.kernels), 'kernel')}"


def _finding(steps: Mapping[str, LaunchedStep]) -> str:
    texts = [
        f"{units.duration(step.busy)} of work take {units.duration(step.lasts)} ({name})"
        for name, step in steps.items()
    ]
    return f"The device waits for launches: {', '.join(texts)}"
