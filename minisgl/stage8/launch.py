"""Starts the server's processes, watches them, and ends them. Knows nothing of what they say to each other."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from minisgl.core.errors import EngineFailure
from minisgl.stage8.child import EngineInfo, Orders
from minisgl.stage8.child_process import ChildProcess, reporting
from minisgl.stage8.server_config import ServerConfig
from minisgl.stage8.sockets import Addresses

SECONDS_TO_STOP = 5.0
SECONDS_TO_ANSWER = 8.0  # its thread that does needs little of a processor, and Python's lock for a moment
SECONDS_TO_WORK = 300.0  # at all that a tokenizer or the detokenizer has found in its queue at once
SECONDS_TO_EXPLAIN = 5.0  # when one process fails: until the one that knows why has said so

SCHEDULER, TEXT = "minisgl.stage8.scheduler_process", "minisgl.stage8.text_process"


class ProcessDied(EngineFailure):
    """One of the server's processes has ended, which none does by itself. One line: which, how and why."""


class Processes:
    """config.tp schedulers, a detokenizer, and config.num_tokenizer tokenizers.

    Whoever uses them binds first: a PUSH to each of to_tokenizer_addresses (a request goes to that of its
    uid % their number, its abort too) and a PULL to from_detokenizer_address; then calls `start`.
    """

    info: EngineInfo  # once started

    def __init__(self, config: ServerConfig, folder: Path) -> None:
        """folder: the model's. Raises ValueError when no socket can be made for the length of its path."""
        self._directory = Path(tempfile.mkdtemp(prefix="minisgl-"))  # mode 0700
        # What children need not know they do not.
        self._config = replace(config, model=str(folder), api_key=None, admin_key=None)
        self._children: list[ChildProcess] = []
        self._starting = threading.RLock()
        self._stopped = False
        try:
            addresses = Addresses(self._directory)
        except ValueError:
            self.stop()
            raise
        self.to_tokenizer_addresses = [addresses.tokenizer(i) for i in range(max(1, config.num_tokenizer))]
        self.from_detokenizer_address = addresses.api

    def start(self) -> EngineInfo:
        """Returns when all are ready. Raises ValueError when a setting is at fault, else ProcessDied; then none is
        left. May run in another thread than `stop`."""
        with self._starting:
            try:
                for module, orders in self._all_orders():
                    if self._stopped:
                        raise ProcessDied("the server was stopped while it started")
                    self._children.append(ChildProcess(module, orders))
                self.info = self._wait_until_ready()
            except BaseException:
                self.stop()
                raise
        return self.info

    @property
    def pids(self) -> dict[str, int]:
        """By name, such as "scheduler 0"."""
        return {child.name: child.pid for child in self._children}

    @property
    def signs_of_death(self) -> list[int]:
        """File descriptors: one of them can be read when a process has died."""
        return [child.fileno() for child in self._children]

    def ask(self) -> None:
        """Ask all whether they run. Only once they are ready, and somebody takes the answers in: see `hear`."""
        for child in self._children:
            child.ask()

    def silent(self) -> str | None:
        """Which process should have answered by now, in one line: it was stopped, or the machine is swapping. Or which
        one answers, and hangs."""
        for child in self._children:
            if child.silent_seconds > SECONDS_TO_ANSWER:
                return f"the {child.name} process has not answered for {child.silent_seconds:.0f} s"
            if child.working_seconds > SECONDS_TO_WORK:
                return f"the {child.name} process hangs: it has been at the same work for {child.working_seconds:.0f} s"
        return None

    def hear(self) -> bool:
        """Take in what they have reported. Returns whether one has died."""
        for child in reporting([child for child in self._children if not child.dead], 0):
            child.report()
        return any(child.dead for child in self._children)

    def dead(self) -> str | None:
        """Which process has died, how and why, in one line; None when all live. Waits a little when the one that died
        may be another's victim."""
        return self._cause().death() if self.hear() else None

    def stop(self) -> None:
        """End them all, by force if need be, and leave no process and no file. May be called twice."""
        self._stopped = True
        children = list(self._children)
        for child in children:
            child.end()
        deadline = time.monotonic() + SECONDS_TO_STOP
        for child in children:
            child.wait(deadline)
        with self._starting:  # who still reads their reports has seen their death first
            for child in children:
                child.close()
            self._children = []
        shutil.rmtree(self._directory, ignore_errors=True)

    def _all_orders(self) -> Iterator[tuple[str, Orders]]:
        """The modules to run, and what each is told. The schedulers first: they take longest."""
        config, folder, directory = self._config, self._config.model, str(self._directory)
        for rank in range(config.tp):
            yield SCHEDULER, Orders(config, folder, directory, ["scheduler"], rank)
        shared = [] if config.num_tokenizer else ["tokenizer"]
        yield TEXT, Orders(config, folder, directory, ["detokenizer", *shared], 0)
        for index in range(config.num_tokenizer):
            yield TEXT, Orders(config, folder, directory, ["tokenizer"], index)

    def _wait_until_ready(self) -> EngineInfo:
        """Rank 0 says what it made of the settings, and the others need that to become ready."""
        info: EngineInfo | None = None
        waiting = set(self._children)
        while waiting or info is None:
            for child in reporting(self._children):
                ready = child.report()
                if ready is None:
                    self._raise_cause()
                elif ready.info:
                    info = ready.info
                    for other in self._children:
                        other.tell(info)
                waiting.discard(child)
        return info

    def _raise_cause(self) -> None:
        if self._stopped:
            raise ProcessDied("the server was stopped while it started")
        child = self._cause()
        if child.failed and child.failed.kind == "invalid":
            raise ValueError(child.failed.error)
        raise ProcessDied(child.death())

    def _cause(self) -> ChildProcess:
        """The one of the dead that died first. A rank that ends takes the others with it, and their last words may
        come sooner: so wait a little for one that does not blame another."""
        deadline = time.monotonic() + SECONDS_TO_EXPLAIN
        while True:
            dead = [child for child in self._children if child.dead]
            causes = [child for child in dead if child.failed is None or child.failed.kind != "peer lost"]
            alive = [child for child in self._children if not child.dead]
            if causes or not alive or time.monotonic() > deadline:
                return (causes or dead)[0]
            for child in reporting(alive, 0.1):
                child.report()
