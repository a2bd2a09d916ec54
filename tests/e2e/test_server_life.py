"""How a server begins and ends: clearly, with the right status, and with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prompts import ORBIT
from server_process import SMALL, ServerProcess, running

pytestmark = pytest.mark.slow  # processes start, die and are waited for

ENDLESS = {"prompt": ORBIT, "max_tokens": 4000, "ignore_eos": True, "stream": True}


def test_sigterm_lets_open_requests_finish(tmp_path: Path, model_folder: Path) -> None:
    trace = tmp_path / "trace.json"
    with running(tmp_path, *SMALL, "--trace", str(trace)) as server:
        body = ENDLESS | {"max_tokens": 40}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            while httpx.get(f"{server.url}/ready").status_code == 200:
                pass
            assert httpx.get(f"{server.url}/health").status_code == 200
            refused = httpx.post(f"{server.url}/v1/completions", json=ENDLESS)
            assert refused.status_code == 503
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert server.remains() == []
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"Tokenize", "Reply"} <= names


def test_a_second_signal_ends_at_once(tmp_path: Path, model_folder: Path) -> None:
    with running(tmp_path, *SMALL) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            while httpx.get(f"{server.url}/ready").status_code == 200:
                pass
            server.process.send_signal(signal.SIGTERM)
            for _ in lines:
                pass
        assert server.wait() == 0
        assert server.remains() == []


def test_sigterm_while_it_starts(tmp_path: Path, model_folder: Path) -> None:
    server = ServerProcess(tmp_path, *SMALL)
    try:
        while not server.find_children():
            assert server.process.poll() is None, server.log
        assert server.end() == 0
        assert "Traceback" not in server.log
        assert server.remains() == []
    finally:
        server.kill()


def test_when_a_child_dies_streams_say_so_and_the_server_ends(tmp_path: Path, model_folder: Path) -> None:
    with running(tmp_path, *SMALL) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.children[0], signal.SIGKILL)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert "SIGKILL" in error["message"]
        assert server.wait() == 1
        assert server.log.count("error: ") == 1
        assert server.remains() == []


def test_a_taken_port_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = ServerProcess(tmp_path, "--port", port)
        assert server.wait() == 1
    assert server.log.count("\n") == 1
    assert port in server.log
    assert "--port" in server.log
    assert server.remains() == []
    server.kill()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--max-seq-len", "9000"], "9000"),
        (["--port", "70000"], "70000"),
        (["--host", "203.0.113.1"], "203.0.113.1"),  # reserved: no machine's own
        (["--host", "no..name"], "no..name"),
        (["--tp", "0"], "--tp"),
        (["--temperature", "nan"], "temperature"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(
    flags: list[str], words: str, tmp_path: Path, model_folder: Path
) -> None:
    server = ServerProcess(tmp_path, *SMALL, *flags)
    try:
        assert server.wait() == 2
        assert [line for line in server.log.splitlines() if "error" in line and words in line], server.log
        assert "Traceback" not in server.log
        assert server.remains() == []
    finally:
        server.kill()


def test_where_names_the_file_of_a_role() -> None:
    command = [sys.executable, "-m", "minisgl", "where", "radix"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "minisgl/stage4/radix_cache.py" in result.stdout
