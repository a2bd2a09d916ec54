"""What SIGINT and SIGTERM do, from the program's first moment to its last. Knows nothing of the server.

At first they end the program at once, which has nothing yet that could be left behind; from then on they are counted.
Imports only what the interpreter has loaded anyway, so that the first moment comes soon.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import asyncio

NUMBERS = (signal.SIGINT, signal.SIGTERM)


def leave_on_signals() -> None:
    """While the modules are loaded and the model is fetched: status 0, as for a server that has served nobody."""
    for number in NUMBERS:
        signal.signal(number, _leave)


def default_signals() -> None:
    """For a program that is no server."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Signals:
    """Counts them, to the end of the program: one that comes while the interpreter ends must not change its status.
    Make it in the main thread, before anything that would be left behind."""

    def __init__(self) -> None:
        self.count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._came: asyncio.Event | None = None
        for number in NUMBERS:
            signal.signal(number, self._take)

    def event(self, loop: asyncio.AbstractEventLoop, came: asyncio.Event) -> None:
        """Set `came`, an event of the running loop, when the first comes or has come."""
        self._loop, self._came = loop, came
        if self.count:
            came.set()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._loop is not None and self._came is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._came.set)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)
