"""Records what happens and when, for Perfetto and for figures; free when off. Knows nothing of what it records.

Each process appends its events to a part of its own, `FILE.<role><rank>.jsonl`: recording sends no messages, and a
process that dies loses only its last moments. The parent merges the parts into `FILE` when all have ended. All times
are nanoseconds of CLOCK_MONOTONIC, which the processes of one machine share.
"""

from __future__ import annotations

import atexit
import json
import re
import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from minisgl.core.trace_events import Event, merge, parts, read_events

__all__ = ["Event", "Tracer", "merge", "read_events"]

ASYNC_TRACK, COUNTER_TRACK = "requests", "counters"


class Tracer:
    """One a process. `Tracer(None)` records nothing, and each of its methods returns at once.

    May be called from several threads. A track is a lane of the picture, such as "scheduler" or "device"; the spans
    of one track must nest. uid is the request that an event belongs to; further arguments are JSON values.
    """

    def __init__(self, path: str | Path | None, role: str = "main", rank: int = 0) -> None:
        """path: the merged file that will be. role, rank: name this process. "main" is the parent, made before its
        children: it clears away parts that an earlier run left. Raises ValueError when path cannot be written."""
        if not re.fullmatch("[a-z_]+", role) or rank < 0:
            raise ValueError(f"role must be lower-case letters and rank at least 0, not {role!r:.80} and {rank}")
        self.enabled = path is not None
        if path is None:
            return
        path = Path(path)
        try:
            if path.is_dir():
                raise IsADirectoryError(f"{path} is a folder")
            for stale in parts(path) if role == "main" else []:
                stale.unlink()
            self._file = open(f"{path}.{role}{rank}.jsonl", "w", encoding="utf-8")  # noqa: SIM115 (until close)
        except OSError as error:
            raise ValueError(f"--trace {path} cannot be written ({error}): name a file in a folder of yours") from error
        self._encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
        self._lock = threading.Lock()
        atexit.register(self.close)

    def now(self) -> int:
        """Nanoseconds, for `complete`."""
        return time.monotonic_ns()

    def span(self, name: str, track: str, uid: int | None = None, **args: Any) -> AbstractContextManager[None]:
        """`with tracer.span("schedule", track="scheduler"):` records how long its body takes."""
        return self._span(name, track, uid, args) if self.enabled else _NO_SPAN

    def complete(self, name: str, start_ns: int, end_ns: int, track: str, uid: int | None = None, **args: Any) -> None:
        """A span that was timed by the caller, with `now`."""
        if self.enabled:
            self._write(Event(name, "X", start_ns, track, uid, args, duration=end_ns - start_ns))

    def instant(self, name: str, track: str, uid: int | None = None, **args: Any) -> None:
        """Something without a duration."""
        if self.enabled:
            self._write(Event(name, "i", self.now(), track, uid, args))

    def begin(self, name: str, uid: int, **args: Any) -> None:
        """A request enters a state (queued, prefill, decode, retracted). States of one request nest or follow on."""
        if self.enabled:
            self._write(Event(name, "b", self.now(), ASYNC_TRACK, uid, args))

    def end(self, name: str, uid: int, **args: Any) -> None:
        """It leaves the state of that name."""
        if self.enabled:
            self._write(Event(name, "e", self.now(), ASYNC_TRACK, uid, args))

    def phase(self, before: str | None, after: str | None, uid: int) -> None:
        """A request leaves one phase and enters the next: queued, prefill, decode. None: it was or is not there."""
        if self.enabled:
            if before:
                self.end(before, uid)
            if after:
                self.begin(after, uid)

    def counter(self, name: str, **values: float) -> None:
        """Values from now on, drawn stacked: `counter("pages", free=3, used=5)`."""
        if self.enabled:
            self._write(Event(name, "C", self.now(), COUNTER_TRACK, None, values))

    def flow_start(self, flow_id: int, track: str) -> None:
        """An arrow starts in the span that is open on the track. flow_id: unique in this process, such as the step."""
        if self.enabled:
            self._write(Event("flow", "s", self.now(), track, flow_id=flow_id))

    def flow_end(self, flow_id: int, track: str) -> None:
        """The arrow ends in the span that is open on the track."""
        if self.enabled:
            self._write(Event("flow", "f", self.now(), track, flow_id=flow_id))

    def close(self) -> None:
        """Write out what is buffered; record nothing more. May be called twice."""
        if not self.enabled:
            return
        self.enabled = False
        atexit.unregister(self.close)
        with self._lock:
            self._file.close()

    @contextmanager
    def _span(self, name: str, track: str, uid: int | None, args: dict[str, Any]) -> Generator[None, None, None]:
        start = self.now()
        try:
            yield
        finally:
            self.complete(name, start, self.now(), track, uid, **args)

    def _write(self, event: Event) -> None:
        line = self._encode(event.to_part())
        with self._lock:
            if self.enabled:  # another thread may have closed it
                self._file.write(line + "\n")


_NO_SPAN: AbstractContextManager[None] = nullcontext()  # shared: it holds nothing
