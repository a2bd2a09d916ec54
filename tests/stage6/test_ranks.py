"""Ranks as processes: they answer as one, they end together, and they leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.core.config import make_config
from minisgl.core.outputs import TokenOutput
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage6 import ranks as ranks_module
from minisgl.stage6.config import ParallelConfig
from minisgl.stage6.llm import LLM
from minisgl.stage6.messages import Abort, Failed, Idle, Order, Outputs, Ready, Start, Stop, encode
from minisgl.stage6.ranks import RankGroup

PROMPTS = ["The quick brown fox", "Wie geht es dir?", "def add(a, b):"]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 64, "page_size": 4, "device": "cpu", "max_seq_len": 256}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def is_running(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


@pytest.mark.timeout(120)
def test_two_ranks_from_start_to_the_death_of_one(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), **OPTIONS) as alone:
        expected = alone.generate(PROMPTS, greedy(16))
        baseline = alone.stats()
    llm = LLM(str(tiny_folder), tp=2, **OPTIONS)
    try:
        assert isinstance(llm.ranks, RankGroup)
        processes, folder = llm.ranks._processes, Path(llm.ranks._folder.name)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert llm.generate(PROMPTS, greedy(16)) == expected
        assert llm.stats() == baseline

        with pytest.raises(ValueError, match="max_tokens"):
            llm.generate(["fine", "too long"], [greedy(4), greedy(10_000)])
        chunks = llm.stream("Once upon a time", greedy(200))
        assert [next(chunks).token_ids for _ in range(3)]
        chunks.close()
        stats = llm.stats()
        assert stats["pages_free"] + stats["pages_cached"] == 64
        assert stats["rows_free"] == baseline["rows_free"]
        assert [c.token_ids for c in llm.generate(PROMPTS, greedy(16))] == [c.token_ids for c in expected]

        chunks = llm.stream("The end", greedy(200))
        next(chunks)
        os.kill(processes[1].pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
            list(chunks)
        assert not any(map(is_running, processes))
        assert not folder.exists()
        with pytest.raises(RuntimeError, match="make a new one"):
            llm.generate("again", greedy(1))
    finally:
        llm.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_ends_with_its_parent_even_in_a_collective(tiny_folder: Path, tmp_path: Path) -> None:
    """The only rank of two: it waits for the other for ever, until the socket to its parent closes."""
    private = tmp_path / "private"
    private.mkdir()
    options = {**OPTIONS, "model": str(tiny_folder), "tp": 2}
    start = Start("minisgl.stage6.llm", options, str(tiny_folder), 256, [257], 0, str(private / "rendezvous"), 30)
    ours, theirs = socket.socketpair()
    with theirs:
        command = [ranks_module.sys.executable, "-m", "minisgl.stage6.rank_main", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        connection = Connection(ours.detach())
        connection.send_bytes(encode(start))
        while not (private / "rendezvous").exists():
            assert is_running(process)
            time.sleep(0.02)
        connection.close()
        assert process.wait(60) == 1
        assert not private.exists()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_end_without_the_interpreters_end(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While that is under way, a thread of gloo that lets go of a tensor ends the process with SIGABRT."""
    tell = f"import atexit, pathlib, os; atexit.register(pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.end').touch)"
    (tmp_path / "sitecustomize.py").write_text(tell)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    subprocess.run([ranks_module.sys.executable, "-c", ""], check=True, timeout=60)
    assert len(list(tmp_path.glob("*.end"))) == 1, "an end of the other kind is seen"
    with LLM(str(tiny_folder), tp=2, **OPTIONS) as llm:
        assert isinstance(llm.ranks, RankGroup)
        processes = llm.ranks._processes
        llm.generate("a", greedy(1))
    assert [process.returncode for process in processes] == [0, 0]
    assert len(list(tmp_path.glob("*.end"))) == 1


class FakeProcess:
    """Stands in for subprocess.Popen: a rank played by a thread, which `script` gives its words."""

    def __init__(self, script: Callable[[int, Connection], int], pass_fds: list[int]) -> None:
        self._connection = Connection(os.dup(pass_fds[0]))
        self.pid = -1
        self._code: int | None = None
        self._thread = threading.Thread(target=self._play, args=(script,), daemon=True)
        self._thread.start()

    def _play(self, script: Callable[[int, Connection], int]) -> None:
        start = msgspec.msgpack.decode(self._connection.recv_bytes(), type=Start)
        try:
            self._code = script(start.rank, self._connection)
        except (OSError, EOFError):
            self._code = -signal.SIGKILL
        self._connection.close()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._code is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return self._code

    def kill(self) -> None:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # the script sees the end of its input


def start_group(monkeypatch: pytest.MonkeyPatch, script: Callable[[int, Connection], int], tp: int = 2) -> RankGroup:
    def popen(command: list[str], *, pass_fds: list[int], **_: Any) -> FakeProcess:
        return FakeProcess(script, pass_fds)

    monkeypatch.setattr(ranks_module.subprocess, "Popen", popen)
    config = make_config(ParallelConfig, {"tp": tp, "device": "cpu"})
    return RankGroup("minisgl.stage6.llm", config, Path("/model"), 64, frozenset({1}))


def say_and_end(connection: Connection, *words: Any, code: int = 1) -> int:
    for word in words:
        connection.send_bytes(encode(word))
    return code


def test_start_raises_the_error_of_a_setting_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="^no memory for a single page$"):
        start_group(monkeypatch, lambda rank, conn: say_and_end(conn, Failed("no memory for a single page", "invalid")))


def test_the_cause_is_named_not_its_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sees only that rank 1 has gone, and says so first."""
    said = threading.Event()

    def script(rank: int, connection: Connection) -> int:
        if rank == 0:
            say_and_end(connection, Failed("rank 0 lost the others", "peer lost"))
            said.set()
            return 1
        said.wait(60)
        return say_and_end(connection, Failed("KeyError: 'layers'", "error"))

    with pytest.raises(RuntimeError, match="^rank 1 ended with exit status 1: KeyError: 'layers'$"):
        start_group(monkeypatch, script)


def test_a_silent_death_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(rank: int, connection: Connection) -> int:
        if rank == 1:
            return -signal.SIGSEGV
        say_and_end(connection, Ready(1, 2, 3))
        return len(connection.recv_bytes())  # waits

    with pytest.raises(RuntimeError, match="rank 1 was killed by SIGSEGV"):
        start_group(monkeypatch, script)


def test_idle_that_came_before_belongs_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is idle also before the first request: `drain` takes the word that follows the outputs."""
    output = TokenOutput(7, 3, "stop", 0)

    def script(rank: int, connection: Connection) -> int:
        say_and_end(connection, Ready(64, 2, 3), *[Idle({"step": 0})][rank:])
        connection.recv_bytes()
        say_and_end(connection, *[Outputs([output]), Outputs([]), Idle({"step": 2})][3 * rank :])
        while not isinstance(msgspec.msgpack.decode(connection.recv_bytes(), type=Order), Stop):
            pass
        return 0

    group = start_group(monkeypatch, script)
    group.send(Abort([]))
    assert group.outputs() == [output]
    group.drain()
    assert group.stats == {"step": 2}
    group.close()
    with pytest.raises(RuntimeError, match="they were closed"):
        group.send(Stop())
