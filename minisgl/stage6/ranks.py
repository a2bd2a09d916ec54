"""The ranks' processes as their parent sees them: started, spoken to, watched, ended. Knows nothing of what they do.

Each rank has a socket pair to the parent. Its end is also the sign of life in both directions: whoever sees it
closed knows that the other is dead. It needs no port, and no process is left behind, even by a parent that is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import msgspec

from minisgl.core.errors import EngineFailure
from minisgl.core.outputs import TokenOutput
from minisgl.core.threads import RANK_THREADS
from minisgl.stage6.config import ParallelConfig
from minisgl.stage6.messages import Failed, Idle, Order, Outputs, Ready, Report, Start, Stop, encode

SECONDS_TO_STOP = 10.0
SECONDS_TO_EXPLAIN = 5.0  # when one rank fails: until the one that knows why has said so


class RankGroup:
    """config.tp processes that run the loop of a stage in lock step."""

    def __init__(
        self, module: str, config: ParallelConfig, folder: Path, max_seq_len: int, eos_ids: frozenset[int]
    ) -> None:
        """module: the stage's llm.py, as an import. Returns when all ranks are ready. Raises what the first of them
        said that failed (ValueError for a setting, else EngineFailure), and then none is left."""
        self._folder = tempfile.TemporaryDirectory(prefix="minisgl-")
        self._decode = msgspec.msgpack.Decoder(Report).decode
        self._error: str | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self.stats: dict[str, int] = {}  # of rank 0, when it was idle last
        threads = RANK_THREADS if config.threads is None else config.threads
        options = dataclasses.asdict(dataclasses.replace(config, threads=threads))
        try:
            for rank in range(config.tp):
                self._start(
                    Start(
                        module=module,
                        config=options,
                        folder=str(folder),
                        max_seq_len=max_seq_len,
                        eos_ids=sorted(eos_ids),
                        rank=rank,
                        rendezvous=str(Path(self._folder.name) / "rendezvous"),
                        log_level=logging.getLogger("minisgl").getEffectiveLevel(),
                    )
                )
            self.ready = self._wait_until_ready()
        except BaseException:
            self._error = self._error or "they did not start"
            self.close()
            raise

    @property
    def num_pages(self) -> int:
        return self.ready[0].num_pages

    @property
    def alive(self) -> bool:
        return self._error is None

    def send(self, order: Order) -> None:
        """To every rank. Raises EngineFailure when one has ended."""
        self._check()
        message = encode(order)
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError:
            self._fail({})

    def outputs(self) -> list[TokenOutput]:
        """Of the next step that had any; waits for it. Raises EngineFailure when a rank has ended."""
        while True:
            report = self._receive()[1]
            if isinstance(report, Outputs):
                return report.outputs

    def drain(self) -> None:
        """Wait until nothing waits, runs or is in flight. Only after the last output of every request."""
        while not isinstance(self._receive()[1], Idle):
            pass

    def close(self) -> None:
        """End all ranks, and leave no process and no file. May be called twice."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended
                connection.send_bytes(encode(Stop()))
        deadline = time.monotonic() + (SECONDS_TO_STOP if self._error is None else 0)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._connections = []
        self._error = self._error or "they were closed"
        self._folder.cleanup()

    def _start(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(Connection(ours.detach()))
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "minisgl.stage6.rank_main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for answers: what a library prints there is a log line
                start_new_session=True,  # Ctrl-C is for the parent alone, which then ends them in order
                env={**loopback_only(), **os.environ},
            )
        self._processes.append(process)
        self._connections[-1].send_bytes(encode(start))

    def _wait_until_ready(self) -> list[Ready]:
        ready: dict[int, Ready] = {}
        while len(ready) < len(self._processes):
            rank, report = self._receive()
            if isinstance(report, Ready):
                ready[rank] = report
        return [ready[rank] for rank in sorted(ready)]

    def _check(self) -> None:
        if self._error is not None:
            raise EngineFailure(f"the ranks of this LLM have ended ({self._error}): make a new one")

    def _receive(self) -> tuple[int, Report]:
        """The next message of any rank, and which one's."""
        self._check()
        connection = wait(self._connections)[0]
        assert isinstance(connection, Connection)
        rank = self._connections.index(connection)
        report = self._read(rank)
        if report is None or isinstance(report, Failed):
            self._fail({rank: report})
        if isinstance(report, Idle):
            self.stats = report.stats
        return rank, report

    def _read(self, rank: int) -> Report | None:
        """None when the rank has closed its end."""
        try:
            return self._decode(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            return None

    def _fail(self, last_words: dict[int, Failed | None]) -> NoReturn:
        """End all ranks and raise the cause. A rank that fails takes others with it, and theirs may be the first word
        that comes: so wait a little for that of the rank that knows why.

        last_words: so far, by rank; None of a rank that died without any.
        """
        deadline = time.monotonic() + SECONDS_TO_EXPLAIN
        while not any(map(_is_cause, last_words.values())) and len(last_words) < len(self._connections):
            left = {self._connections[rank]: rank for rank in range(len(self._connections)) if rank not in last_words}
            ready = [rank for connection, rank in left.items() if connection in wait(list(left), 0.1)]
            if not ready and time.monotonic() > deadline:
                break
            for rank in ready:
                report = self._read(rank)
                if report is None or isinstance(report, Failed):
                    last_words[rank] = report
        rank = min(last_words, key=lambda rank: (not _is_cause(last_words[rank]), rank))
        words = last_words[rank]
        self._error = f"rank {rank} {_status(self._processes[rank])}: {words.error if words else 'without a word'}"
        self.close()
        if words and words.kind == "invalid":
            raise ValueError(words.error)
        raise EngineFailure(self._error)


def _is_cause(words: Failed | None) -> bool:
    """Not just that another rank has ended."""
    return words is None or words.kind != "peer lost"


def _status(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(SECONDS_TO_EXPLAIN)
    except subprocess.TimeoutExpired:
        return "hangs"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def loopback_only() -> dict[str, str]:
    """Ranks of one machine meet there: it works without a network, and nobody else can reach them."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}
