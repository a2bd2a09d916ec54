"""`python -m minisgl.viz TRACE --figure gantt -o out.png`: one figure of a trace as a file. `--list` names them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from minisgl import viz
from minisgl.core.terminal import show_any_text
from minisgl.core.trace import Event, read_events
from minisgl.viz.style import LOOKS

Events = Sequence[Event]
Draw = Callable[[Events, argparse.Namespace, dict[str, Any]], Figure]  # the last: title and size

FORMATS = (".png", ".svg", ".pdf")
FIGURES: Mapping[str, tuple[str, Draw]] = {
    "gantt": ("when each request waits and runs", lambda events, a, look: viz.gantt(events, **look)),
    "batch": ("decode and prefill tokens of each step", lambda events, a, look: viz.batch_composition(events, **look)),
    "timeline": (
        "scheduler and engine side by side, bubbles shaded (--first, --count)",
        lambda events, a, look: viz.timeline(events, first=a.first, count=a.count, **look),
    ),
    "launches": (
        "each launch and kernel of a step that record-trace has recorded",
        lambda events, a, look: viz.launches({"": events}, **look),
    ),
    "recorded-layers": (
        "what ranks compute and where they meet, by record-trace (--first, from 0)",
        lambda events, a, look: viz.recorded_layers(events, first=a.first, **look),
    ),
    "page-map": (
        "which request holds which page, over time",
        lambda events, a, look: viz.page_map(viz.page_snapshots(events), **look),
    ),
    "page-usage": (
        "pages in rows, in the prefix cache, and free",
        lambda events, a, look: viz.page_usage(events, **look),
    ),
    "triangle": (
        "which positions each step of one request computes, of stages 1 and 2 (--uid)",
        lambda events, a, look: viz.cost_triangles(
            {_name(events, a): viz.step_tokens(events, _uid(events, a))}, **look
        ),
    ),
    "time-per-token": (
        "how long each step of one request takes, of stages 1 and 2 (--uid)",
        lambda events, a, look: viz.time_per_token(
            {_name(events, a): viz.step_seconds(events, _uid(events, a))}, **look
        ),
    ),
    "latency": ("time to first token, and between tokens", lambda events, a, look: viz.latency(events, **look)),
    "journey": (
        "one request's way through the processes of stage 8 (--uid)",
        lambda events, a, look: viz.journey(events, a.uid, **look),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2, with one line on stderr, for what the user got wrong."""
    show_any_text()
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.list:
        for name, (text, _) in FIGURES.items():
            print(f"{name:16}{text}")
        return 0
    if arguments.trace is None or arguments.figure is None:
        parser.error("name a trace and a figure: TRACE --figure NAME -o FILE (--list shows the figures)")
    out = arguments.output or Path(f"{arguments.figure}.png")
    if out.suffix not in FORMATS:
        parser.error(f"-o {out} must end with one of {' '.join(FORMATS)}")
    try:
        _, draw = FIGURES[arguments.figure]
        figure = draw(read_events(arguments.trace), arguments, {"title": arguments.title, "size": arguments.size})
    except (ValueError, OSError) as error:
        parser.error(f"{arguments.figure} of {arguments.trace}: {error}")
    try:
        figure.savefig(out)
    except OSError as error:
        parser.error(f"cannot write {out} ({error.strerror}): name with -o a file in a folder of yours that exists")
    print(out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m minisgl.viz", description="Draw a figure from a trace.")
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="what --trace FILE of a stage has written")
    parser.add_argument("--figure", choices=list(FIGURES), help="which one")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="a .png, .svg or .pdf (default: FIGURE.png)")
    parser.add_argument("--size", choices=list(LOOKS), default="notebook", help="and the size of its letters")
    parser.add_argument("--title", help="instead of the finding that is computed")
    parser.add_argument("--uid", type=int, help="of the request, where one is drawn (default: the first)")
    parser.add_argument("--first", type=int, help="timeline: the first step, from 1 (default: from the middle)")
    parser.add_argument("--count", type=int, default=16, help="timeline: how many steps (default: 16)")
    parser.add_argument("--list", action="store_true", help="say which figures there are")
    return parser


def _uid(events: Events, arguments: argparse.Namespace) -> int:
    """Raises ValueError unless the trace has steps of this request alone."""
    uids = sorted({event.uid for event in events if event.phase == "X" and event.uid is not None})
    uid = arguments.uid if arguments.uid is not None else uids[0] if uids else None
    if uid is None or uid not in uids:
        has = f"of requests {uids[0]} to {uids[-1]}" if uids else "of no single request: record it with stage 1 or 2"
        raise ValueError(f"request {uid} has no steps of its own in the trace, which has steps {has}")
    return uid


def _name(events: Events, arguments: argparse.Namespace) -> str:
    return f"request {_uid(events, arguments)}"


if __name__ == "__main__":
    sys.exit(main())
