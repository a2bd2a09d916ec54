"""How many connections there may be, and how long each may wait. Knows nothing of what is asked or answered.

uvicorn limits only the silence between two requests. A client that never ends its request, or never reads its answer,
would keep a descriptor for ever, and in the latter case the place of a request that could be open instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from minisgl.stage8.errors import ApiError, bad_request, unavailable

READ_SECONDS = 60.0  # for a whole request, from the connection or from its first byte
MAX_HEAD = 64 << 10  # bytes of the request line and all headers: uvicorn's setting for h11
WRITE_SECONDS = 120.0  # without taking anything of what is there to be read
MAX_FILES = 1 << 16  # open at once, of which most are connections
OTHER_FILES = 256  # pipes, sockets to the other processes, modules that are loaded late


def allow_connections() -> int:
    """How many may be open, once this process may open as many files as the system lets it. At first that are often
    1,024, fewer than requests may be open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MAX_FILES if limit == resource.RLIM_INFINITY else min(limit, MAX_FILES) for limit in limits)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):  # macOS has a limit below the one it tells
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, limits[1]))
            soft = hard
    return max(1, soft - OTHER_FILES)


class Connection(H11Protocol):
    """A client that keeps it waiting for longer is disconnected, which aborts its request.

    uvicorn would choose httptools where that is installed, but there headers have no bound; h11's is 64 KiB.
    """

    def __init__(self, *args: Any, most: int = MAX_FILES, **kwargs: Any) -> None:
        """most: connections of the server that may be open: one more is closed at once."""
        super().__init__(*args, **kwargs)
        self._most = most
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.abort()
            return
        self._reading = self.loop.call_later(READ_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.MUST_CLOSE:
            return  # the client has said that nothing would come after its request
        super().data_received(data)
        self._time_reading()
        is_asked = self.cycle is not None and not self.cycle.more_body
        if is_asked and len(self.conn.trailing_data[0]) < MAX_HEAD:
            self.flow.resume_reading()  # else nobody would see the client leave

    def on_response_complete(self) -> None:
        super().on_response_complete()  # takes up what came with the request before
        self._time_reading()

    def _time_reading(self) -> None:
        """Only while there is a part of a request: its answer, and the silence after that, have limits of their own."""
        state = self.conn.their_state
        if state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0]):
            self._reading = self._reading or self.loop.call_later(READ_SECONDS, self.transport.abort)
        else:
            self._reading = _cancelled(self._reading)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or has too long a head, is refused in the same form as all else. Unless it is the rest of a
        request that has its answer."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(bad_request(f"this is not a valid HTTP request, or its head is over {MAX_HEAD} bytes"))
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """The server ends, and does not wait for the rest of a request."""
        if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE:
            self._refuse(unavailable("the server is shutting down: it takes no new requests"))
        else:
            super().shutdown()

    def _refuse(self, error: ApiError) -> None:
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(error.body))),
            ("connection", "close"),
            *(error.headers or {}).items(),
        ]
        reason = HTTPStatus(error.status).phrase.encode()
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=reason),
            h11.Data(error.body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Java's client offers HTTP/2 on each connection, and is answered in HTTP/1.1: no reason for two warnings."""

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing = _cancelled(self._writing)

    def connection_lost(self, error: Exception | None) -> None:
        self._reading, self._writing = _cancelled(self._reading), _cancelled(self._writing)
        super().connection_lost(error)

    def _watch(self, unread: int) -> None:
        self._writing = self.loop.call_later(WRITE_SECONDS, self._stalled, unread)

    def _stalled(self, unread: int) -> None:
        """A client that is only slow has taken something since, though the buffer is still full."""
        now_unread = self.transport.get_write_buffer_size()
        if now_unread < unread:
            self._watch(now_unread)
        else:
            self.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None
