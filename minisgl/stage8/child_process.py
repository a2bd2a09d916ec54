"""A child as its parent sees it: two pipes and a status. Knows nothing of its work, nor of its siblings.

What goes through the pipes is in child.py.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from minisgl.stage8.child import Answering, Failed, Orders, Ready, Report

SECONDS_TO_EXIT = 5.0  # after its last words

# oneDNN keeps a kernel of 0.6 MB for each shape it has met, 1,024 of them, in two caches: a server meets every number
# of tokens, and would grow by hundreds of MB. A miss costs 0.3 ms.
SMALL_CACHES = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}


class ChildProcess:
    """`reporting` waits for reports, and so for deaths."""

    def __init__(self, module: str, orders: Orders) -> None:
        self.name = orders.name
        self.failed: Failed | None = None  # its last words
        self.dead = False
        self.working_seconds = 0.0  # for which it has been at the same thing, when it last answered
        self._asked: float | None = None  # since when it owes an answer, in seconds of time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**SMALL_CACHES, **os.environ, "PYTHONPATH": _python_path()},
            start_new_session=True,  # Ctrl-C is for the parent alone, which then ends them in order
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._reports = self._process.stdin, self._process.stdout
        self.tell(orders)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Can be read when there is a report, and when the child is dead."""
        return self._reports.fileno()

    def tell(self, line: msgspec.Struct) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead, which `report` will say
            self._orders.write(msgspec.json.encode(line) + b"\n")

    def ask(self) -> None:
        """Whether it runs. Only once until it has answered, so what it does not read cannot fill the pipe."""
        if self._asked is None:
            self._asked = time.monotonic()
            with contextlib.suppress(OSError):
                self._orders.write(b"\n")

    @property
    def silent_seconds(self) -> float:
        """How long it has owed an answer."""
        return 0.0 if self._asked is None else time.monotonic() - self._asked

    def report(self) -> Ready | None:
        """What it has to say; waits for that. None when it has not become ready, or is dead, or as good (`failed`)."""
        lines = os.read(self.fileno(), 65536).splitlines()  # a report is written at once, and shorter than a pipe
        self.dead = self.dead or not lines
        ready: Ready | None = None
        for report in (msgspec.json.decode(line, type=Report) for line in lines):
            if isinstance(report, Ready):
                ready = report
            elif isinstance(report, Answering):
                self._asked, self.working_seconds = None, report.working
            else:
                self.dead, self.failed = True, report
        return ready

    def death(self) -> str:
        """How it died, and why if it said so, in one line. Only when it is dead."""
        why = f": {self.failed.error}" if self.failed else ""
        try:
            status = self._process.wait(SECONDS_TO_EXIT)
        except subprocess.TimeoutExpired:
            return f"the {self.name} process hangs{why}"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"the {self.name} process {how}{why}"

    def end(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(OSError):
            self._orders.close()

    def wait(self, deadline: float) -> None:
        """Until it has ended. It is killed at the deadline, in seconds of time.monotonic()."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Only when it has ended."""
        self._reports.close()


def reporting(children: Iterable[ChildProcess], timeout: float | None = None) -> list[ChildProcess]:
    """Those that have a report or are dead. Waits for the first, but no longer than timeout seconds."""
    with selectors.PollSelector() as selector:  # others take a descriptor, of which connections may leave none
        for child in children:
            selector.register(child.fileno(), selectors.EVENT_READ, child)
        return [key.data for key, _ in selector.select(timeout)]


def _python_path() -> str:
    """A child runs the very package that its parent does, wherever both were started."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
