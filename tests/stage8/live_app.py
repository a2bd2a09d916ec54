"""The app over a fake ring behind a real port, in a thread: for clients that do not speak ASGI."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fake_ring import FakeRing, reply
from test_frontend import listening

from minisgl.stage8.api import create_app
from minisgl.stage8.connection import Connection
from minisgl.stage8.messages import Decode, Encode, Flush
from minisgl.stage8.service import Service


def answer(question: Any) -> list:
    """A short answer to everything, and as many logprobs as are asked for: none."""
    if isinstance(question, Encode | Decode | Flush):
        return [reply(question.uid, "Hi", "stop")]
    return [reply(question.uid, "Hel"), reply(question.uid, "lo", "stop", 2)]


@contextmanager
def live(ring: FakeRing, key: str | None = None) -> Iterator[tuple[str, Service]]:
    """Its address, and its service."""
    service = Service(("m",), "m", {}, None, 512, "ready")
    config = uvicorn.Config(create_app(service, key), http=Connection, port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)

    async def main() -> None:
        async with listening(ring, max_open=200) as service.frontend:
            ring.beat(pages_free=9)
            await server.serve()

    server.capture_signals = lambda: contextmanager(lambda: iter([None]))()  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}", service
    finally:
        server.should_exit = True
        thread.join(30)
