"""What the events of a trace say of requests and steps. Draws nothing.

Ranks do the same: one speaks for all. Times are seconds since the trace's first event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from minisgl.core.trace import Event

PHASES = ("prefill", "decode", "mixed")


class Span(NamedTuple):
    """A request was in a state: queued, prefill, decode, running (prefill and decode in one), retracted."""

    uid: int
    state: str
    start: float
    end: float


class Step(NamedTuple):
    """One forward pass, and how many tokens it computed of requests that decode, and of prompts. padding: dummy
    requests beside them, to fill a recorded graph."""

    start: float
    end: float
    decode: int
    extend: int
    padding: int = 0

    @property
    def tokens(self) -> int:
        return self.decode + self.extend


def origin(events: Sequence[Event]) -> int:
    """Nanoseconds. events: at least one."""
    return events[0].ts


def seconds(events: Sequence[Event], ts: int) -> float:
    return (ts - origin(events)) / 1e9


def end_of(event: Event) -> int:
    return event.ts + (event.duration or 0)


def of_one_rank(events: Sequence[Event], wanted: Callable[[Event], bool]) -> list[Event]:
    """The wanted events of the lowest rank that has any."""
    found = [event for event in events if wanted(event)]
    first = min(((event.rank, event.role) for event in found), default=None)
    return [event for event in found if (event.rank, event.role) == first]


def request_spans(events: Sequence[Event]) -> list[Span]:
    """By start. A state that never ended lasts to the end of the trace. Raises ValueError if it tells of no request."""
    states = of_one_rank(events, lambda event: event.phase in ("b", "e"))
    if not states:
        return _spans_of_steps(events)
    start, last = origin(events), max(map(end_of, events))
    spans: list[Span] = []
    open_states: dict[tuple[int, str], int] = {}
    for event in states:
        key = (event.uid or 0, event.name)
        if event.phase == "b":
            open_states[key] = event.ts
        elif key in open_states:
            spans.append(Span(*key, (open_states.pop(key) - start) / 1e9, (event.ts - start) / 1e9))
    spans += [Span(*key, (ts - start) / 1e9, (last - start) / 1e9) for key, ts in open_states.items()]
    return sorted(spans, key=lambda span: (span.start, span.uid))


def _spans_of_steps(events: Sequence[Event]) -> list[Span]:
    """Stages 1 and 2 run one request at a time: its steps, one after the other, are its states."""
    spans: list[Span] = []
    for event in of_one_rank(events, lambda event: event.phase == "X" and event.uid is not None):
        state = event.name if event.name in PHASES else "running"
        span = Span(event.uid or 0, state, seconds(events, event.ts), seconds(events, end_of(event)))
        if spans and spans[-1][:2] == span[:2]:
            spans[-1] = spans[-1]._replace(end=span.end)
        else:
            spans.append(span)
    if not spans:
        raise ValueError('the trace tells of no request: it needs begin and end events, or spans with "uid"')
    return spans


def engine_spans(events: Sequence[Event]) -> list[Event]:
    """The forward passes, in order. Raises ValueError when there is none."""
    for track in ("device", "engine"):  # a simulated device has a track of its own
        found = of_one_rank(events, lambda event, track=track: event.phase == "X" and event.track == track)  # type: ignore[misc]
        if found:
            return found
    raise ValueError('the trace has no step: it needs spans on the track "engine"')


def steps(events: Sequence[Event]) -> list[Step]:
    """Each forward pass. Raises ValueError when the trace does not say how many tokens one computed."""
    plans = of_one_rank(events, lambda event: event.name == "schedule" and event.phase == "X")
    by_step = {event.args.get("step"): event.args for event in plans}
    found: list[Step] = []
    for number, span in enumerate(engine_spans(events), start=1):
        args = {**span.args, **by_step.get(span.args.get("step", number), {})}
        phase = args.get("phase") or (span.name if span.name in PHASES else "prefill")
        tokens = args.get("tokens", args.get("requests") if phase == "decode" else None)
        decode = args.get("decode", {"decode": tokens, "prefill": 0}.get(phase))
        if tokens is None or decode is None:
            missing = "tokens" if tokens is None else "decode"
            raise ValueError(f"step {number} ({phase}) of the trace does not say its {missing}: record it again")
        padding = args.get("padded", 0) - args.get("requests", 0) if "padded" in args else 0
        start, end = seconds(events, span.ts), seconds(events, end_of(span))
        found.append(Step(start, end, decode, tokens - decode, padding))
    return found


def step_tokens(events: Sequence[Event], uid: int | None = None) -> list[int]:
    """How many tokens each step computed; with uid, each step that ran this request alone (stages 1 and 2)."""
    chosen = [event for event in engine_spans(events) if uid is None or event.uid == uid]
    return [step.tokens for step in steps(chosen)] if uid is not None else [step.tokens for step in steps(events)]


def step_seconds(events: Sequence[Event], uid: int | None = None) -> list[float]:
    """How long each step took; with uid, each step that ran this request alone (stages 1 and 2)."""
    return [(event.duration or 0) / 1e9 for event in engine_spans(events) if uid is None or event.uid == uid]
