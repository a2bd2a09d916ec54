"""Ten minutes of clients of every kind: memory, descriptors, maps and pages stay where they are. Not run by CI.

`pytest -m soak -s tests/e2e/test_server_soak.py` prints a line a minute for each process.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from server_process import ServerProcess, children_of, running
from tiny_model import make_tiny_model

MINUTES = 10
FLAGS = ("--threads", "1", "--dtype", "float32", "--num-pages", "1200", "--num-tokenizer", "1")
LIMITS = ("--max-running-requests", "16", "--max-queued-requests", "64")
WARM = 3  # minutes until allocators and caches have what they will ever need


class Held(NamedTuple):
    kib: int  # resident
    descriptors: int
    maps: int


def held_by(pid: int) -> Held:
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    maps = len((folder / "maps").read_text().splitlines())
    return Held(int(status["VmRSS"].split()[0]), len(list((folder / "fd").iterdir())), maps)


async def one(http: httpx.AsyncClient, chance: random.Random) -> None:
    """A stream or a whole answer, read to its end or left; also what is refused."""
    body = {
        "prompt": "".join(chance.choices("abcdefgh ", k=chance.choice([1, 20, 400, 600]))),
        "max_tokens": chance.choice([1, 8, 60, 10_000 if chance.random() < 0.1 else 8]),
        "temperature": chance.choice([0.0, 1.0]),
        "n": chance.choice([1, 1, 3]),
        "stream": chance.random() < 0.5,
        "stop": chance.choice([None, "z", ["ab", "q"]]),
    }
    patience = chance.choice([0.05, 0.5, 60.0, 60.0])
    try:
        async with http.stream("POST", "/v1/completions", json=body, timeout=patience) as response:
            assert response.status_code in (200, 400, 429)
            pieces = 0
            async for _ in response.aiter_bytes():
                pieces += 1
                if pieces > 3 and patience == 0.5:
                    return
    except httpx.TimeoutException:
        pass


async def load(url: str, seconds: float, chance: random.Random) -> int:
    deadline = time.monotonic() + seconds
    count = 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal count
        while time.monotonic() < deadline:
            await one(http, chance)
            count += 1

    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(client(http) for _ in range(24)))
    return count


def rest(server: ServerProcess) -> None:
    """Until nothing is held; a minute at most."""
    names = ("pages_in_use", "rows_in_use", "requests_open")
    for _ in range(600):
        info = httpx.get(f"{server.url}/server_info", timeout=60).json()
        if not any(info[name] for name in names):
            return
        time.sleep(0.1)
    raise AssertionError(f"not idle: {info}")


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 60 * 3)
def test_nothing_grows(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    chance = random.Random(0)
    with running(tmp_path, "--model", str(model), *FLAGS, *LIMITS) as server:
        pids = {"api": server.process.pid}
        names = ("scheduler", "detokenizer", "tokenizer")
        pids |= dict(zip(names, sorted(children_of(server.process.pid)), strict=True))
        history: dict[str, list[Held]] = {name: [] for name in pids}
        for minute in range(MINUTES):
            count = asyncio.run(load(server.url, 60, chance))
            rest(server)
            time.sleep(1)  # connections that the client has closed
            for name, pid in pids.items():
                history[name].append(held_by(pid))
                print(minute + 1, count, name, history[name][-1], flush=True)
        for name, minutes in history.items():
            warm, last = minutes[WARM - 1], minutes[-1]
            assert last.kib < warm.kib * 1.03 + 2048, f"{name}: {minutes}"
            assert last.descriptors <= warm.descriptors, f"{name}: {minutes}"
            assert last.maps <= warm.maps + 16, f"{name}: {minutes}"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.end() == 0
        assert server.remains() == []
        assert "Traceback" not in server.log
