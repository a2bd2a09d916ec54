"""What each request waits for and when it runs, and what each step is made of. From traces."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from minisgl.core.trace import Event
from minisgl.viz import units
from minisgl.viz.reading import Span, Step, request_spans, steps
from minisgl.viz.style import (
    GREY,
    HATCH,
    INK,
    PALE,
    PALETTE,
    Size,
    few_ticks,
    legend,
    new_figure,
    request_color,
    styled,
    swatch,
)

MOST_LABELS = {"small": 14, "notebook": 20, "projector": 20}
THIN = {"queued": 0.22, "retracted": 0.22}  # it waits; of the usual 0.78


@styled
def gantt(
    events: Sequence[Event], *, at: float | None = None, title: str | None = None, size: Size = "notebook"
) -> Figure:
    """One line for each request: a thin one while it waits, hatched in prefill, solid in decode. at: seconds since
    the trace's start, a moment to mark."""
    spans = request_spans(events)
    uids = sorted({span.uid for span in spans})
    unit = units.time_unit(max(span.end for span in spans))
    figure, (axes,) = new_figure(size, title or _gantt_finding(spans), tall=min(1.6, max(0.7, 0.35 + len(uids) / 20)))
    for span in spans:
        hatch = HATCH if span.state == "prefill" else None
        axes.barh(
            uids.index(span.uid),
            (span.end - span.start) / unit.scale,
            THIN.get(span.state, 0.78),
            left=span.start / unit.scale,
            color=request_color(span.uid),
            hatch=hatch,
            linewidth=0,
            alpha=0.5 if span.state == "retracted" else 1,
        )
    if at is not None:
        axes.axvline(at / unit.scale, color=INK, linestyle="--")
    every = -(-len(uids) // MOST_LABELS[size])
    axes.set_yticks(range(0, len(uids), every), [str(uid) for uid in uids[::every]])
    axes.set_ylim(len(uids) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"time ({unit.name})")
    axes.set_ylabel("request")
    axes.grid(axis="x")
    few_ticks(axes.xaxis, whole=False)
    legend(figure, size, state_entries({span.state for span in spans}))
    return figure


def state_entries(states: set[str]) -> list[tuple[str, Artist]]:
    from matplotlib.lines import Line2D

    looks: dict[str, tuple[str, Artist]] = {
        "queued": ("queued", Line2D([], [], color=GREY)),
        "prefill": ("prefill", swatch(GREY, hatch=HATCH, edgecolor="white")),
        "decode": ("decode", swatch(GREY)),
        "running": ("running (prefill, then decode)", swatch(GREY)),
        "retracted": ("retracted", Line2D([], [], color=GREY, alpha=0.5)),
    }
    return [looks[state] for state in looks if state in states]


def _gantt_finding(spans: Sequence[Span]) -> str:
    """How many ran at once, and how long the unluckiest waited."""
    edges = sorted(
        [(span.start, 1) for span in spans if span.state not in THIN]
        + [(span.end, -1) for span in spans if span.state not in THIN]
    )
    running = most = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    number = units.count(len({span.uid for span in spans}), "request")
    waits = [span for span in spans if span.state in THIN]
    text = f"{number}, at most {most} at a time"
    if waits:
        longest = max(waits, key=lambda span: span.end - span.start)
        text += f": request {longest.uid} waits {units.duration(longest.end - longest.start)}"
    return text


@styled
def batch_composition(
    events: Sequence[Event], *, step: int | None = None, title: str | None = None, size: Size = "notebook"
) -> Figure:
    """Tokens that each step computes: of requests that decode, of prompts, and of dummies that fill a graph.
    step: one to mark, from 1."""
    found = steps(events)
    if step is not None and not 1 <= step <= len(found):
        raise ValueError(f"step must be from 1 to {len(found)}, not {step}")
    figure, (axes,) = new_figure(size, title or _batch_finding(found, step))
    parts = {
        "decode, one token a request": ([s.decode for s in found], {"facecolor": PALETTE[0]}),
        "prefill, tokens of prompts": ([s.extend for s in found], {"facecolor": PALETTE[1], "hatch": HATCH}),
        "padding up to a graph's size": ([s.padding for s in found], {"facecolor": PALE, "hatch": "..."}),
    }
    base = [0] * len(found)
    entries: list[tuple[str, Artist]] = []
    for name, (tokens, look) in parts.items():
        if any(tokens):
            edge = GREY if look["facecolor"] == PALE else "white"
            width = 0.85 if len(found) <= 200 else 1.0
            axes.bar(range(1, len(found) + 1), tokens, width, bottom=base, edgecolor=edge, linewidth=0, **look)  # type: ignore[arg-type]
            entries.append((name, swatch(look["facecolor"], hatch=look.get("hatch"), edgecolor=edge, linewidth=0)))
        base = [low + more for low, more in zip(base, tokens, strict=True)]
    if step is not None:
        axes.axvspan(step - 0.5, step + 0.5, color=INK, alpha=0.15, linewidth=0)
    axes.set_xlim(0.4, len(found) + 0.6)
    axes.set_xlabel("step")
    axes.set_ylabel("tokens computed")
    axes.grid(axis="y")
    few_ticks(axes.xaxis)
    few_ticks(axes.yaxis)
    legend(figure, size, entries)
    return figure


def _batch_finding(found: Sequence[Step], step: int | None) -> str:
    if step is not None:
        one = found[step - 1]
        return f"Step {step} of {len(found)}: {units.count(one.decode, 'token')} of decode, {one.extend} of prompts"
    prompts = units.share(sum(s.extend for s in found), sum(s.tokens for s in found))
    mean = sum(s.decode for s in found) / max(1, sum(1 for s in found if s.decode))
    decoding = f"and a step that decodes has {mean:.1f} requests on average"
    return f"{units.count(len(found), 'step')}: {prompts} of the tokens are prompts', {decoding}"
