"""How a child process begins and ends: its orders, its report, its parent's death. Knows nothing of its work.

The parent holds two pipes to each child. On standard input come the orders, and its end means: end now, whether the
parent closed it or died, of whatever cause. On standard output goes the report, and its end means that the child is
dead. Signals play no part: Ctrl-C and a service manager's SIGTERM reach children too, and the parent must decide.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, NoReturn

import msgspec

from minisgl.core.trace import Tracer
from minisgl.stage8.server_config import ServerConfig

log = logging.getLogger("minisgl")

MAX_ERROR_CHARS = 1000


class Orders(msgspec.Struct, frozen=True):
    """The first line a child reads. roles: of a text process. index: a scheduler's rank, a tokenizer's number."""

    config: ServerConfig
    folder: str
    directory: str
    roles: list[str]
    index: int

    @property
    def name(self) -> str:
        return f"{self.roles[0]} {self.index}"


class EngineInfo(msgspec.Struct, frozen=True):
    """What the scheduler has made of the settings. Text processes read it as their second line."""

    max_seq_len: int
    page_size: int
    num_pages: int

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt and answer together: the pool may hold less than the model can (`check_fits`)."""
        return min(self.max_seq_len, self.num_pages * self.page_size + 1)


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo | None = None  # from rank 0


class Answering(msgspec.Struct, frozen=True, tag=True):
    """To an empty line: this process runs. working: seconds for which its work has been at the same thing, if it says
    so (`Child.working`)."""

    working: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Last words. "invalid": a setting is at fault. "peer lost": another rank is, which knows more."""

    error: str
    kind: Literal["invalid", "peer lost", "error"]


Report = Ready | Answering | Failed


class Child:
    """This process, as its parent sees it. `orders` and `tracer` are there once `begin` has returned."""

    orders: Orders
    tracer: Tracer

    def __init__(self) -> None:
        """Takes standard input and output for itself: what libraries print goes to standard error."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        self._working_since: float | None = None  # seconds of time.monotonic()
        self._lines, self._report = open(os.dup(0), "rb"), os.dup(1)  # noqa: SIM115 (until the end)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)

    def begin(self) -> None:
        self.orders = msgspec.json.decode(self.line(), type=Orders)
        set_logging(self.orders)
        self.tracer = Tracer(self.orders.config.trace, self.orders.roles[0], self.orders.index)

    def line(self) -> bytes:
        """The parent's next line. Without one the process ends: the parent is gone."""
        line = self._lines.readline()
        if not line:
            os._exit(0)
        return line

    def watch(self) -> None:
        """From now on the process ends when the parent wants it or is dead, and until then answers when it is asked
        whether it runs: in a thread of its own, since a step may take long. No `line` is read after this."""
        threading.Thread(target=self._watch, name="watch parent", daemon=True).start()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Around one thing that must come to its end: the parent is told how long it takes."""
        self._working_since = time.monotonic()
        try:
            yield
        finally:
            self._working_since = None

    @property
    def is_over(self) -> bool:
        """The server has ended, whatever this process still has to say: the folder of its sockets is gone."""
        return hasattr(self, "orders") and not os.path.isdir(self.orders.directory)

    def tell(self, report: Report) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(self._report, msgspec.json.encode(report) + b"\n")

    def _watch(self) -> None:
        for line in self._lines:
            if not line.strip():
                since = self._working_since
                self.tell(Answering(0.0 if since is None else time.monotonic() - since))
        self.tracer.close()
        shutil.rmtree(self.orders.directory, ignore_errors=True)  # the parent may not have been able to
        os._exit(0)


def run_child(work: Callable[[Child], None]) -> NoReturn:
    """The whole of a child's life. `work` does not return; what it raises is reported in one line and is the end."""
    child = Child()
    try:
        child.begin()
        work(child)
        raise RuntimeError("the work of this process came to an end, which it should not")
    except BaseException as error:
        if child.is_over:
            os._exit(0)
        words = last_words(error)
        log.log(logging.ERROR if words.kind == "error" else logging.DEBUG, "this process ends", exc_info=error)
        child.tell(words)
        os._exit(1)  # and not SystemExit: threads that still compute would keep it alive


def last_words(error: BaseException) -> Failed:
    text = one_line(error, MAX_ERROR_CHARS)
    if isinstance(error, ValueError):
        return Failed(text, "invalid")
    if type(error).__name__ == "PeerLost":  # not imported: it comes with torch
        return Failed(text, "peer lost")
    return Failed(f"{type(error).__name__}: {text}", "error")


def set_logging(orders: Orders) -> None:
    """Lines carry the process and its rank. Of the ranks only the first tells of progress."""
    level = orders.config.log_level.upper()
    if orders.roles == ["scheduler"] and orders.index > 0 and level == "INFO":
        level = "WARNING"
    form = f"%(asctime)s [{orders.name}] %(levelname)s %(message)s"
    logging.basicConfig(level=level, format=form, datefmt="%H:%M:%S", stream=sys.stderr)


def one_line(error: BaseException, limit: int) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 2] + " …"
