"""Clients that misbehave: after each kind the server answers as before, and holds nothing that it did not hold before.

One server with a random model of a few kilobytes serves all of them, so each test also meets what the others left.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, children_of
from tiny_model import make_tiny_model

pytestmark = pytest.mark.slow  # processes start, die and are waited for

LIMIT = 16  # of open requests
RUNNING = 4
LONG_PROMPT = "abcdefgh" * 500  # 4,000 tokens: 16 chunks
FLAGS = ("--num-tokenizer", "1", "--threads", "1", "--dtype", "float32", "--num-pages", "1200", "--page-size", "16")
LIMITS = ("--max-queued-requests", str(LIMIT), "--max-running-requests", str(RUNNING), "--max-prefill-length", "256")
NORMAL = {"prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
ENDLESS = NORMAL | {"max_tokens": 7000, "stream": True}


class Sound(ServerProcess):
    """Remembers how it answered and what it held when nothing had happened yet."""

    def remember(self) -> None:
        self.answer = self.ask()
        self.check()
        self.descriptors = self.num_descriptors()

    def ask(self) -> str:
        response = httpx.post(f"{self.url}/v1/completions", json=NORMAL, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    def info(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/server_info", timeout=60).json()

    def num_descriptors(self) -> int:
        """Of the API's process; 0 where the system does not tell."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        return len(list(folder.iterdir())) if folder.is_dir() else 0

    def check(self) -> None:
        assert httpx.get(f"{self.url}/health", timeout=60).status_code == 200
        assert self.ask() == self.answer
        held = ("pages_in_use", "rows_in_use", "requests_open", "requests_running", "requests_waiting")
        wait_until(lambda: not any(self.info()[name] for name in held), lambda: self.info())
        if hasattr(self, "descriptors"):
            wait_until(lambda: self.num_descriptors() <= self.descriptors, self.num_descriptors)
        assert sorted(children_of(self.process.pid)) == sorted(self.children), self.log
        assert "Traceback" not in self.log, self.log


def wait_until(what: Callable[[], bool], said: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sound]:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)
    server = Sound(tmp_path_factory.mktemp("t"), "--model", str(model), *FLAGS, *LIMITS)
    try:
        server.wait_ready()
        server.remember()
        yield server
        assert server.end() == 0, server.log
        assert server.remains() == []
    finally:
        server.kill()


# Raw connections: an HTTP library would not misbehave


class Client:
    def __init__(self, server: ServerProcess) -> None:
        self._address = httpx.URL(server.url)

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        writer.write(data)
        return reader, writer

    async def leave_after(self, body: dict[str, Any], when: Callable[[asyncio.StreamReader], Awaitable[None]]) -> None:
        """Ask, and be gone without a word when that has happened."""
        reader, writer = await self.connect(request(body))
        try:
            await when(reader)
        finally:
            writer.transport.abort()


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def seconds(duration: float) -> Callable[[asyncio.StreamReader], Awaitable[None]]:
    return lambda reader: asyncio.sleep(duration)


def chunks(count: int) -> Callable[[asyncio.StreamReader], Awaitable[None]]:
    async def read(reader: asyncio.StreamReader) -> None:
        for _ in range(count):
            await reader.readuntil(b"data: ")

    return read


def storm(server: Sound, bodies: list[tuple[dict[str, Any], Callable]]) -> None:
    async def main() -> None:
        client = Client(server)
        await asyncio.gather(*(client.leave_after(body, when) for body, when in bodies))

    asyncio.run(main())
    server.check()


def test_clients_leave_while_their_prompts_are_computed(server: Sound) -> None:
    chance = random.Random(1)
    bodies = []
    for index in range(LIMIT):
        body = NORMAL | {"prompt": f"{index}{LONG_PROMPT}", "stream": index % 2 == 0}
        bodies.append((body, seconds(chance.uniform(0, 0.5))))
    storm(server, bodies)


def test_clients_leave_streams_after_some_tokens(server: Sound) -> None:
    chance = random.Random(2)
    storm(server, [(ENDLESS | {"n": 1 + index % 2}, chunks(chance.randint(1, 40))) for index in range(LIMIT * 2 // 3)])


def test_clients_leave_that_wait_for_a_whole_answer(server: Sound) -> None:
    chance = random.Random(3)
    storm(server, [(ENDLESS | {"stream": False}, seconds(chance.uniform(0, 0.5))) for _ in range(LIMIT)])


def test_clients_leave_as_their_requests_finish(server: Sound) -> None:
    """The first bytes of a stream come with the last token, or shortly before it."""
    for wave in range(2):
        storm(server, [(ENDLESS | {"max_tokens": 1 + (index + wave) % 3}, chunks(1)) for index in range(LIMIT)])


def test_clients_leave_the_queue(server: Sound) -> None:
    async def main() -> None:
        client = Client(server)
        streams = [asyncio.create_task(client.leave_after(ENDLESS, chunks(10_000))) for _ in range(RUNNING)]
        while (await asyncio.to_thread(server.info))["requests_running"] < RUNNING:
            await asyncio.sleep(0.05)
        queued = [await client.connect(request(NORMAL | {"stream": index % 2 == 0})) for index in range(10)]
        while (await asyncio.to_thread(server.info))["requests_waiting"] < len(queued):
            assert not any(stream.done() for stream in streams)
            await asyncio.sleep(0.05)
        for _, writer in queued:
            writer.transport.abort()
        while (await asyncio.to_thread(server.info))["requests_waiting"] > 0:
            await asyncio.sleep(0.05)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    asyncio.run(main())
    server.check()


def test_ten_times_as_many_as_may_be_open_are_all_answered(server: Sound) -> None:
    async def one(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post("/v1/completions", json=NORMAL | {"max_tokens": 20}, timeout=60)

    async def main() -> list[httpx.Response]:
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, limits=unlimited) as http:
            return await asyncio.gather(*(one(http) for _ in range(10 * LIMIT)))

    answers = asyncio.run(main())
    refused = [answer for answer in answers if answer.status_code == 429]
    good = [answer for answer in answers if answer.status_code == 200]
    assert len(good) >= LIMIT
    assert len(refused) >= 1
    assert len(good) + len(refused) == len(answers)
    assert len({answer.json()["choices"][0]["text"] for answer in good}) == 1
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
    server.check()


def test_200_connections_come_and_go(server: Sound) -> None:
    async def main() -> None:
        client = Client(server)
        whole = request(NORMAL)
        for index in range(200):
            _, writer = await client.connect(whole[: index * 2])
            if index % 2:
                writer.close()
            else:
                writer.transport.abort()

    asyncio.run(main())
    server.check()


def test_clients_that_send_half_a_request_hold_nobody_up(server: Sound) -> None:
    async def main() -> None:
        client = Client(server)
        whole = request(NORMAL)
        half_open = [(await client.connect(whole[: 5 * index]))[1] for index in range(len(whole) // 5)]
        await asyncio.to_thread(server.ask)
        reader, writer = await client.connect()
        for index in range(0, len(whole), 20):  # a slow one, beside those
            writer.write(whole[index : index + 20])
            await asyncio.sleep(0.01)
        assert b" 200 " in await reader.readline()
        for one in (writer, *half_open):
            one.close()

    asyncio.run(main())
    server.check()


def test_a_client_that_does_not_read_holds_nobody_up_and_loses_nothing(server: Sound) -> None:
    body = ENDLESS | {"max_tokens": 200, "n": 2}

    async def main() -> tuple[str, str]:
        reader, writer = await Client(server).connect(request(body))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        while not (await asyncio.to_thread(server.info))["requests_open"]:
            await asyncio.sleep(0.01)
        while (await asyncio.to_thread(server.info))["requests_open"]:  # the engine does not wait for it
            assert await asyncio.to_thread(server.ask) == server.answer
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        texts = ["", ""]
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: {"):
                choice = json.loads(line[len(b"data: ") :])["choices"][0]
                texts[choice["index"]] += choice["text"]
        writer.close()
        return texts[0], texts[1]

    texts = asyncio.run(main())
    whole = httpx.post(f"{server.url}/v1/completions", json=body | {"stream": False}, timeout=60).json()
    assert texts == tuple(choice["text"] for choice in whole["choices"])
    server.check()
