"""Processes that stop, die or fail, and starts that cannot succeed: what clients are told, and that nothing is left.

A random model of a few kilobytes. What goes wrong inside a process is put there by a `sitecustomize` of the test's own.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess, children_of, is_alive, running
from tiny_model import make_tiny_model

pytestmark = pytest.mark.slow  # processes start, die and are waited for

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--threads", "1", "--dtype", "float32", "--num-pages", "1200", "--page-size", "16", "--num-tokenizer", "1")
NORMAL = {"prompt": "The quick brown fox", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
ENDLESS = NORMAL | {"max_tokens": 7000, "stream": True}

FAULTS = """
import sys


if "minisgl.stage8" in sys.orig_argv:
    from minisgl.stage8 import launch

    launch.SECONDS_TO_ANSWER = launch.SECONDS_TO_WORK = 1.5
if "minisgl.stage8.scheduler_process" in sys.orig_argv:
    import time

    from minisgl.stage5.scheduler import Scheduler

    right = Scheduler.forward

    def forward(self, forward_input):
        batch = forward_input.batch
        if any(len(req.input_ids) == 77 for req in batch.reqs):
            time.sleep(4.0)
        if any(req.prompt_len == 93 and len(req.input_ids) >= 193 for req in batch.reqs):
            raise RuntimeError("the device has\\nfallen off the bus")
        return right(self, forward_input)

    Scheduler.forward = forward
if "minisgl.stage8.text_process" in sys.orig_argv:
    import time

    from minisgl.core.tokenizer import Tokenizer

    encode_batch = Tokenizer.encode_batch

    def hang(self, texts, *more):
        time.sleep(8.0 if any(len(text) == 85 for text in texts) else 0.0)
        return encode_batch(self, texts, *more)

    Tokenizer.encode_batch = hang
"""
LONG_STEP, FAILING_STEP = "a" * 77, "a" * 93  # the latter with token 100 of its answer
HANGING = "a" * 85


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)


@pytest.fixture
def with_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "faults"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))


def wait_until(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def health(server: ServerProcess) -> httpx.Response:
    return httpx.get(f"{server.url}/health", timeout=60)


def catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():  # another system
        time.sleep(0.5)
        return True
    (caught,) = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@contextmanager
def stream(server: ServerProcess, body: dict) -> Iterator[Iterator[str]]:
    """The lines of an answer that has begun."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=100) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def check_error_event(lines: Iterator[str], words: str) -> None:
    rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert words in error["message"]


def check_end(server: ServerProcess, status: int, words: str) -> None:
    """One line says why, and nothing is left."""
    assert server.wait() == status, server.log
    (line,) = [line for line in server.log.splitlines() if line.startswith("error: ")]
    assert words in line
    assert server.remains() == []


@pytest.mark.usefixtures("with_faults")
def test_a_stopped_process_is_noticed_and_a_long_step_is_not_one(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, "--model", str(model), *FLAGS) as server:
        seen: list[int] = []
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                seen.append(health(server).status_code)
                done.wait(0.1)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            answer = httpx.post(f"{server.url}/v1/completions", json=NORMAL | {"prompt": LONG_STEP}, timeout=60)
        finally:
            done.set()
            watching.join()
        assert answer.status_code == 200
        assert set(seen) == {200}

        for pid in server.children:
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: health(server).status_code == 503)
            assert "has not answered" in health(server).json()["error"]["message"]
            assert httpx.post(f"{server.url}/v1/completions", json=NORMAL, timeout=60).status_code == 503
            os.kill(pid, signal.SIGCONT)
            wait_until(lambda: health(server).status_code == 200)
            assert httpx.post(f"{server.url}/v1/completions", json=NORMAL, timeout=60).status_code == 200

        os.kill(server.children[0], signal.SIGSTOP)
        assert server.end() == 0, "it must be killed"
        assert server.remains() == []


@pytest.mark.usefixtures("with_faults")
def test_a_tokenizer_that_hangs_is_noticed_while_its_process_answers(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, "--model", str(model), *FLAGS) as server, ThreadPoolExecutor() as pool:
        hanging = pool.submit(httpx.post, f"{server.url}/v1/completions", json=NORMAL | {"prompt": HANGING}, timeout=60)
        wait_until(lambda: health(server).status_code == 503)
        words = health(server).json()["error"]["message"]
        assert "the tokenizer 0 process hangs: it has been at the same work for" in words
        assert hanging.result().status_code == 200
        wait_until(lambda: health(server).status_code == 200)


@pytest.mark.usefixtures("with_faults")
def test_an_exception_in_a_forward_ends_streams_and_server(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, "--model", str(model), *FLAGS) as server:
        body = ENDLESS | {"prompt": FAILING_STEP}
        with stream(server, ENDLESS) as other, stream(server, body) as lines:
            check_error_event(lines, "fallen off the bus")
            assert health(server).status_code == 503
            check_error_event(other, "fallen off the bus")
        check_end(server, 1, "RuntimeError: the device has fallen off the bus; the server ends")


@pytest.mark.parametrize(
    ("name", "flags"), [("detokenizer", ()), ("tokenizer 0", ()), ("scheduler 1", ("--tp", "2"))], ids=str
)
def test_a_killed_process_ends_streams_and_server(tmp_path: Path, model: Path, name: str, flags: tuple) -> None:
    with running(tmp_path, "--model", str(model), *FLAGS, *flags) as server:
        names = ["scheduler 0", *(["scheduler 1"] if flags else []), "detokenizer", "tokenizer 0"]  # as they start
        victim = dict(zip(names, sorted(server.children), strict=True))[name]
        with stream(server, ENDLESS) as lines:
            os.kill(victim, signal.SIGKILL)
            check_error_event(lines, f"the {name}")
        check_end(server, 1, "was killed by SIGKILL; the server ends")


def test_a_killed_parent_takes_its_children_and_files_along(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, "--model", str(model), *FLAGS) as server, stream(server, ENDLESS):
        server.process.kill()
        server.process.wait()
        wait_until(lambda: server.remains() == [])


def test_what_is_not_done_at_the_end_of_the_drain_ends_with_an_error(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, "--model", str(model), *FLAGS, "--drain-timeout", "0.5") as server:
        with stream(server, ENDLESS) as lines:
            server.process.send_signal(signal.SIGTERM)
            check_error_event(lines, "shutting down")
        assert server.wait() == 0, server.log
        assert server.remains() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_of_the_start_is_an_orderly_end(tmp_path: Path, model: Path, number: int) -> None:
    """From when Python itself has started, which takes some 30 ms. The later ones come when all is ready."""
    servers = []
    try:
        for index in range(7):
            (tmp_path / str(index)).mkdir()
            server = ServerProcess(tmp_path / str(index), "--model", str(model), *FLAGS)
            servers.append(server)
            wait_until(lambda server=server: catches_sigterm(server.process.pid))
            time.sleep(0.1 * index * index)
            server.children = children_of(server.process.pid)
            server.process.send_signal(number)
        for server in servers:
            assert server.process.wait(200) == 0, server.log
            assert "Traceback" not in server.log
            assert "error" not in server.log
            wait_until(lambda server=server: server.remains() == [])
    finally:
        for server in servers:
            server.kill()


def break_model(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "no configuration":
        (folder / "config.json").unlink()
    elif how == "half a configuration":
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text[: len(text) // 2])
    elif how == "no tokenizer":
        for file in folder.glob("*token*"):
            file.unlink()
    elif how == "half the weights":
        os.truncate(weights, weights.stat().st_size // 2)
    else:
        weights.write_bytes(b"")


BROKEN = {
    "no configuration": "config.json",
    "half a configuration": "config.json",
    "no tokenizer": "tokenizer",
    "half the weights": "model.safetensors",
    "empty weights": "model.safetensors",
}


def test_a_broken_model_is_one_line_and_status_2(tmp_path: Path) -> None:
    servers = {}
    try:
        for index, how in enumerate(BROKEN):
            folder = make_tiny_model(tmp_path / str(index) / "model")
            break_model(folder, how)
            servers[how] = ServerProcess(folder.parent, "--model", str(folder), *FLAGS, "--log-level", "warning")
        for how, server in servers.items():
            pids = server.find_children()
            assert server.process.wait(200) == 2, f"{how}: {server.log}"
            (line,) = server.log.splitlines()
            assert "error: " in line
            assert BROKEN[how] in line, f"{how}: {line}"
            assert server.remains() == []
            assert not any(map(is_alive, pids))
    finally:
        for server in servers.values():
            server.kill()
