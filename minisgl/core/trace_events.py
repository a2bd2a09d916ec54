"""Trace events in memory, in the parts of each process, and in the merged file. Knows nothing of recording.

The merged file is Google's Trace Event Format, which ui.perfetto.dev and chrome://tracing open. Its pid and tid
are numbers given here in order; names come as metadata events, and arguments carry the request's uid.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Phase = Literal["X", "i", "b", "e", "C", "s", "f"]  # span, instant, async begin and end, counter, flow start and end

_PROCESS_STRIDE = 2**40  # ids of requests and flows are below it; ids of different processes must differ


@dataclass(frozen=True)
class Event:
    """Times in nanoseconds of CLOCK_MONOTONIC. role and rank say which process it was."""

    name: str
    phase: Phase
    ts: int
    track: str
    uid: int | None = None
    args: dict[str, Any] = field(default_factory=dict)
    duration: int | None = None  # of a span
    flow_id: int | None = None  # of a flow's start and end
    role: str = ""
    rank: int = 0

    def to_part(self) -> dict[str, Any]:
        """What a part's line holds: role and rank are in the part's name."""
        fields = {"name": self.name, "phase": self.phase, "ts": self.ts, "track": self.track, "uid": self.uid}
        fields |= {"args": self.args, "duration": self.duration, "flow_id": self.flow_id}
        return {key: value for key, value in fields.items() if value is not None and value != {}}


def parts(path: str | Path) -> list[Path]:
    """The part files that belong to a merged file, sorted by name."""
    path = Path(path)
    if not path.parent.is_dir():
        return []
    pattern = re.compile(re.escape(path.name) + r"\.[a-z_]+[0-9]+\.jsonl")
    return sorted(file for file in path.parent.iterdir() if pattern.fullmatch(file.name))


def merge(path: str | Path) -> None:
    """Write all parts as one file and remove them. Without parts nothing is done.

    Called by the parent when no process records any more. Events are streamed: a long trace need not fit in memory.
    """
    path = Path(path)
    files = parts(path)
    if not files:
        return
    unfinished = path.with_name(path.name + ".tmp")
    with open(unfinished, "w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for pid, file in enumerate(files, start=1):
            for item in _chrome_events(file, pid):
                out.write(separator + json.dumps(item, separators=(",", ":")))
                separator = ",\n"
        out.write("\n]}\n")
    os.replace(unfinished, path)
    for file in files:
        file.unlink()


def read_events(path: str | Path) -> list[Event]:
    """All events in the order of time, from the parts if there are any (a run in progress or one that crashed), else
    from the merged file. Raises ValueError when there is neither, or it is no trace of ours."""
    path = Path(path)
    files = parts(path)
    if files:
        events = [event for file in files for event in _read_part(file)]
    elif path.is_file():
        events = _read_merged(path)
    else:
        raise ValueError(f"no trace at {path}, and no parts of one: record it with --trace {path}")
    return sorted(events, key=lambda event: (event.ts, -(event.duration or 0)))  # a span before those in it


def _read_part(file: Path) -> Iterator[Event]:
    """The events of one process. A last line that was cut off when the process died is left out."""
    name = re.search(r"\.([a-z_]+)([0-9]+)\.jsonl$", file.name)
    if name is None:
        raise ValueError(f"{file} is not named like a part of a trace: FILE.<role><rank>.jsonl")
    role, rank = name[1], int(name[2])
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield Event(**json.loads(line), role=role, rank=rank)
            except (ValueError, TypeError) as error:
                raise ValueError(f"line {number} of {file} is no trace event ({error!s:.200})") from error


def _chrome_events(file: Path, pid: int) -> Iterator[dict[str, Any]]:
    tids: dict[str, int] = {}
    for event in _read_part(file):
        if not tids:
            yield _name("process_name", pid, 0, f"{event.role} {event.rank}")
        if event.track not in tids:
            tids[event.track] = len(tids)
            yield _name("thread_name", pid, tids[event.track], event.track)
        yield _chrome_event(event, pid, tids[event.track])


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _chrome_event(event: Event, pid: int, tid: int) -> dict[str, Any]:
    """Chrome counts in microseconds, and matches async events and flows by category and id over all processes."""
    args = event.args if event.uid is None else {"uid": event.uid, **event.args}
    item = {"name": event.name, "ph": event.phase, "ts": event.ts / 1000, "pid": pid, "tid": tid, "args": args}
    if event.phase == "X":
        item["dur"] = (event.duration or 0) / 1000
    elif event.phase == "i":
        item["s"] = "t"  # drawn on its own track only
    elif event.phase in "be":
        item |= {"cat": "request", "id": pid * _PROCESS_STRIDE + (event.uid or 0)}
    elif event.phase in "sf":
        item |= {"cat": "flow", "id": pid * _PROCESS_STRIDE + (event.flow_id or 0)}
        if event.phase == "f":
            item["bp"] = "e"  # ends in the span around it, not in the next one to start
    return item


def _read_merged(path: Path) -> list[Event]:
    try:
        items = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        names = {(x["name"], x["pid"], x["tid"]): x["args"]["name"] for x in items if x["ph"] == "M"}
        return [_event(item, names) for item in items if item["ph"] != "M"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of minisgl ({type(error).__name__}: {error!s:.200})") from error


def _event(item: dict[str, Any], names: dict[tuple[str, int, int], str]) -> Event:
    role, rank = names["process_name", item["pid"], 0].split()
    args = dict(item["args"])
    return Event(
        name=item["name"],
        phase=item["ph"],
        ts=round(item["ts"] * 1000),
        track=names["thread_name", item["pid"], item["tid"]],
        uid=args.pop("uid", None),
        args=args,
        duration=round(item["dur"] * 1000) if "dur" in item else None,
        flow_id=item["id"] % _PROCESS_STRIDE if item["ph"] in "sf" else None,
        role=role,
        rank=int(rank),
    )
