"""A few steps cut out of a trace, and written with where they come from. Records nothing itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from minisgl.benchmark.device_trace import LAUNCHES, STREAM
from minisgl.core.trace import Event, merge
from minisgl.kernel.device_lane import TRACK as DEVICE

HOST = ("scheduler", "engine")  # tracks


def last_steps(events: Sequence[Event], batch: int, count: int) -> tuple[int, int]:
    """The first and the last of `count` decode steps near the end of the trace: by then everything is warm, and all of
    the batch decode. Raises ValueError when there are not as many, one after another."""
    plans = [plan for plan in _plans(events, "decode") if plan["requests"] == batch]
    found = [plan["step"] for plan in plans][-count - 2 : -2]
    if len(found) != count or found[-1] - found[0] != count - 1:
        raise ValueError(f"the run had no {count + 2} decode steps of {batch} requests in a row: raise --steps")
    return found[0], found[-1]


def fullest_prefill(events: Sequence[Event]) -> int:
    """The step of prompts alone with the most tokens; the last of these."""
    return max((plan["tokens"], plan["step"]) for plan in _plans(events, "prefill"))[1]


def cut_steps(events: Sequence[Event], first: int, last: int) -> list[Event]:
    """What hosts and devices did from when step `first` was scheduled to when `last` was over. No single kernels."""
    spans = [event for event in events if event.phase == "X" and event.track in (*HOST, DEVICE)]
    begin = min(event.ts for event in spans if event.name == "schedule" and event.args["step"] == first)
    end = max(_end(event) for event in spans if event.track != "scheduler" and event.args.get("step") == last)
    return [event for event in spans if event.ts < end and _end(event) > begin]


def cut_kernels(events: Sequence[Event], step: int) -> list[Event]:
    """One step in detail, on each rank: its schedule and forward, all launches in the latter, and what came of them."""
    found: list[Event] = []
    for rank in sorted({event.rank for event in events}):
        own = [event for event in events if event.rank == rank and event.phase == "X"]
        host = [event for event in own if event.track in HOST and event.args.get("step") == step]
        (forward,) = (event for event in host if event.name == "forward")
        launches = [e for e in own if e.track == LAUNCHES and forward.ts <= e.ts <= _end(forward)]
        numbers = {event.args["launch"] for event in launches}
        kernels = [e for e in own if e.track.startswith(STREAM) and e.args["launch"] in numbers]
        found += [*host, *launches, *kernels]
    return found


def layer_spans(events: Sequence[Event], num_layers: int) -> list[Event]:
    """One step's kernels, those of `cut_kernels`, as spans on the track "device" of each rank: "compute", from one
    meeting of the ranks to the next, and "all-reduce" or "all-gather". Raises ValueError when the ranks do not meet
    once for the embedding and twice a layer (what comes after is the head's)."""
    found: list[Event] = []
    for rank in sorted({event.rank for event in events}):
        kernels = [event for event in events if event.rank == rank and event.track.startswith(STREAM)]
        spans: list[Event] = []
        meetings = 0
        for meets, group in groupby(sorted(kernels, key=lambda event: event.ts), key=_meets):
            for run in [[kernel] for kernel in group] if meets else [list(group)]:
                name = "compute" if not meets else "all-reduce" if meetings <= 2 * num_layers else "all-gather"
                place = _place(meetings, num_layers) | ({"kernel": run[0].name} if meets else {})
                spans.append(_span(name, run, place))
                meetings += meets
        if 0 < meetings < 1 + 2 * num_layers:
            raise ValueError(f"rank {rank} met the others {meetings} times in {num_layers} layers")
        found += spans if meetings else [replace(span, args={**span.args, "part": "all"}) for span in spans]
    return found


def _plans(events: Iterable[Event], phase: str) -> list[dict[str, Any]]:
    """Rank 0's, which are those of all."""
    plans = [event.args for event in events if event.name == "schedule" and event.rank == 0]
    return [plan for plan in plans if plan["phase"] == phase]


def _meets(kernel: Event) -> bool:
    """NCCL's kernels, and those by way of symmetric memory: ours and torch's."""
    return re.search("nccl|_shot|all_?reduce|all_?gather", kernel.name.lower()) is not None


def _span(name: str, kernels: Sequence[Event], place: dict[str, Any]) -> Event:
    """busy_ns: in which at least one of them ran (a kernel may be launched before the one ahead of it ends)."""
    start = end = kernels[0].ts
    busy = 0
    for kernel in kernels:
        busy += max(0, _end(kernel) - max(end, kernel.ts))
        end = max(end, _end(kernel))
    args = {**place, "kernels": len(kernels), "busy_ns": busy}
    return replace(kernels[0], name=name, track=DEVICE, ts=start, duration=end - start, args=args)


def _place(meetings: int, num_layers: int) -> dict[str, Any]:
    """Where in the model a rank is that has met the others so often: each layer ends its two parts so."""
    if meetings == 0:
        return {"part": "embedding"}
    if meetings > 2 * num_layers:
        return {"part": "head"}
    return {"part": "mlp" if meetings % 2 == 0 else "attention", "layer": (meetings - 1) // 2}


def write(path: Path, events: Iterable[Event], provenance: dict[str, Any]) -> None:
    """A trace like any other, which `read_events` and Perfetto read, with the provenance as its "otherData"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    order = sorted(events, key=lambda event: (event.role, event.rank, event.ts, -(event.duration or 0)))
    for (role, rank), own in groupby(order, key=lambda event: (event.role, event.rank)):
        lines = [json.dumps(event.to_part(), separators=(",", ":")) + "\n" for event in own]
        path.with_name(f"{path.name}.{role}{rank}.jsonl").write_text("".join(lines), encoding="utf-8")
    merge(path)
    document = {"otherData": provenance, **json.loads(path.read_text(encoding="utf-8"))}
    path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


def provenance(path: Path) -> dict[str, Any]:
    """Of a file that `write` has written."""
    return json.loads(path.read_text(encoding="utf-8"))["otherData"]


def _end(event: Event) -> int:
    return event.ts + (event.duration or 0)
