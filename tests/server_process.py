"""A real server for tests: started, watched and ended, with everything it leaves behind in view."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 120.0
SMALL = ("--dtype", "float32", "--threads", "1", "--num-pages", "512")


class ServerProcess:
    """`python -m minisgl.stage8` on a free port. Temporary files go under `folder`."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self._log = folder / "stderr"
        self.sockets = folder / "s"
        self.sockets.mkdir()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "minisgl.stage8", "--port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.sockets)},
            )
        self.url = ""
        self.children: list[int] = []

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (ready := re.search(r"minisgl ready: (http://\S+)/v1", self.log)):
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"the server is not ready:\n{self.log}"
            time.sleep(0.05)
        self.url = ready[1]
        self.find_children()

    def find_children(self) -> list[int]:
        self.children = children_of(self.process.pid)
        return self.children

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(60)

    def remains(self) -> list[object]:
        """Processes and files that outlived the server."""
        return [pid for pid in self.children if is_alive(pid)] + list(self.sockets.iterdir())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()
        for pid in self.children:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[ServerProcess]:
    server = ServerProcess(folder, *flags)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(child) for child, parent in map(str.split, listed.splitlines()) if int(parent) == pid]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
