"""Connections that wait for their client: for how long, and for whom longer. Real sockets, limits of a moment."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import uvicorn

from minisgl.stage8 import connection

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "READ_SECONDS", 0.2)
    monkeypatch.setattr(connection, "WRITE_SECONDS", 0.2)


class App:
    """Reads the body, unless it refuses it, waits, and answers with so many bytes."""

    def __init__(self, size: int = 2, wait: float = 0.0, refuses: bool = False) -> None:
        self.size, self.wait, self.refuses = size, wait, refuses
        self.events: list[str] = []

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        message = {"type": "http.request", "more_body": not self.refuses}
        while message.get("more_body"):
            message = await receive()
        if message["type"] == "http.disconnect":
            self.events.append("gone before the answer")
            return
        await asyncio.sleep(self.wait)
        length = [(b"content-length", str(self.size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"x" * self.size, "more_body": True})
        await send({"type": "http.response.body"})
        self.events.append("gone" if (await receive())["type"] == "http.disconnect" else "more")


def talk(app: Callable, what: Talk, log_level: str = "error", http: Any = connection.Connection) -> None:
    async def main() -> None:
        config = uvicorn.Config(app, http=http, port=0, log_level=log_level, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        try:
            await asyncio.wait_for(what(reader, writer), 30)
        finally:
            writer.transport.abort()
            server.should_exit = True
            await running

    asyncio.run(main())


async def closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(65536):
            pass


def test_more_than_may_be_open_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when no descriptor is left, which asyncio would report some thousand times a second."""
    monkeypatch.setattr(connection, "READ_SECONDS", 60.0)

    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("peername")
        for _ in range(3):
            second, other = await asyncio.open_connection(host, port)
            await closed(second)
            other.close()
        writer.write(HEAD + b"abcd")
        assert b"200" in await reader.readuntil(b"xx")

    talk(App(), what, http=partial(connection.Connection, most=1))


def test_as_many_connections_as_the_system_allows() -> None:
    """Many systems allow a process 1,024 open files at first, and more if it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try:
        most = connection.allow_connections()
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert allowed == (connection.MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, connection.MAX_FILES))
        assert most == allowed - connection.OTHER_FILES > 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_the_system_refuses_is_not_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS says that there is no limit, and has one."""

    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1000, resource.RLIM_INFINITY))
    assert connection.allow_connections() == 1000 - connection.OTHER_FILES


@pytest.mark.parametrize("data", [b"", HEAD[:20], HEAD, HEAD + b"abc"])
def test_a_request_that_never_ends_is_not_waited_for(data: bytes) -> None:
    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await closed(reader)

    app = App()
    talk(app, what)
    assert app.events == (["gone before the answer"] if data.startswith(HEAD) else [])


def test_nor_is_a_second_request_on_the_same_connection() -> None:
    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"abcd")
        assert b"200" in await reader.readuntil(b"xx")
        writer.write(HEAD[:20])
        await closed(reader)

    talk(App(), what)


@pytest.mark.parametrize("begun", [HEAD, HEAD + b"ab"])
def test_nor_is_one_that_came_with_the_one_before(begun: bytes) -> None:
    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"abcd" + begun)
        assert b"200" in await reader.readuntil(b"xx")
        await closed(reader)

    app = App()
    talk(app, what)
    assert "gone before the answer" in app.events


def test_a_body_that_comes_after_its_refusal_costs_no_connection() -> None:
    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(HEAD)
            assert b"200" in await reader.readuntil(b"xx")
            writer.write(b"abcd")
            await asyncio.sleep(3 * connection.READ_SECONDS)

    talk(App(refuses=True), what)


def test_a_body_that_goes_wrong_after_its_refusal_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.replace(b"Content-Length: 4", b"Transfer-Encoding: chunked"))
        assert b"200" in await reader.readuntil(b"xx")
        writer.write(b"no length\r\n")
        await closed(reader)

    talk(App(refuses=True), what)
    assert [record for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_who_offers_another_protocol_is_answered_in_this_one(protocol: bytes, capfd: pytest.CaptureFixture) -> None:
    """Java's client offers HTTP/2 with each first request: it is no reason to warn."""

    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + protocol + b"\r\n\r\n"
        writer.write(HEAD[:-2] + offer + b"abcd")
        assert b"200" in await reader.readuntil(b"xx")

    talk(App(), what, log_level="warning")
    assert "pgrade" not in capfd.readouterr().err


def test_a_request_that_dribbles_has_no_more_time() -> None:
    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closing = asyncio.create_task(closed(reader))
        while not closing.done():
            writer.write(b"GET / HTTP/1.1\r\nX: " if not writer.transport.is_closing() else b"")
            await asyncio.sleep(0.02)

    app = App()
    talk(app, what)
    assert app.events == []


def test_an_answer_may_take_its_time() -> None:
    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"abcd")
        assert b"200" in await reader.readuntil(b"xx")

    talk(App(wait=1.0), what)


def test_a_client_is_missed_though_it_has_sent_more_than_its_request() -> None:
    async def app(scope: dict, receive: Callable, send: Callable) -> None:
        assert await receive() == {"type": "http.request", "body": b"abcd", "more_body": False}
        begun.set()
        events.append((await receive())["type"])

    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"abcd")
        await begun.wait()
        for piece in (b"GET", b" / HT", b"TP/1.1"):
            writer.write(piece)
            await asyncio.sleep(0.05)
        writer.close()
        while not events:
            await asyncio.sleep(0.01)

    begun, events = asyncio.Event(), []
    talk(app, what)
    assert events == ["http.disconnect"]


@pytest.mark.parametrize("more", [b"\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x00"])
def test_what_comes_after_the_last_request_costs_no_answer(more: bytes) -> None:
    """Old clients end a body with a line break that it does not count."""

    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD[:-2] + b"Connection: close\r\n\r\nabcd")
        await asyncio.sleep(0.1)
        writer.write(more)
        assert (await reader.read()).endswith(b"\r\n\r\nxx")

    talk(App(wait=0.3), what)


def test_no_more_is_taken_before_its_turn_than_a_head_has() -> None:
    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = 64 << 20  # more than the system's buffers hold
        writer.write(HEAD + b"abcd" + b"x" * size)
        await asyncio.sleep(0.2)
        assert writer.transport.get_write_buffer_size() > size / 2

    talk(App(wait=1.0), what)


def test_a_client_that_reads_nothing_is_left() -> None:
    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD + b"abcd")
        while not app.events:
            await asyncio.sleep(0.01)

    app = App(size=64 << 20)
    talk(app, what)
    assert app.events == ["gone"]


def test_one_that_reads_slowly_gets_all_of_it() -> None:
    """More than the system's buffers hold, in one piece: each pause is shorter than the limit, all are longer."""

    async def what(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"abcd")
        head = await reader.readuntil(b"\r\n\r\n")
        size, count = 32 << 20, 0
        while count < size:
            data = await reader.read(1 << 20)
            assert data, f"closed after {count} of {size} bytes; {head!r}"
            count += len(data)
            if count % (4 << 20) < len(data):
                await asyncio.sleep(0.1)

    talk(App(size=32 << 20), what)
