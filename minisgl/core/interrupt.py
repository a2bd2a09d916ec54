"""What Ctrl-C does to a command: one line and status 130, from the first import on. Knows no command.

Imports only what the interpreter has loaded anyway, so that the first moment comes soon.
"""

from __future__ import annotations

import sys
from types import TracebackType

INTERRUPTED = 130  # 128 + SIGINT, as shells count


def leave_on_interrupt() -> None:
    """A KeyboardInterrupt that nobody catches shows no traceback. Call this before the imports that take seconds."""
    sys.excepthook = _leave


def _leave(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, traceback)
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)
