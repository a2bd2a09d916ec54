"""One answer, from the first reply to the last byte. Knows nothing of what was asked.

Nothing is sent before the engine has begun on every prompt, so whatever is wrong with a request is a status code, in
a stream too. A client that goes away ends the work at once, whether or not anything was sent yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.stage8.ask import Ask
from minisgl.stage8.call import Call
from minisgl.stage8.errors import as_api_error
from minisgl.stage8.frontend import Frontend
from minisgl.stage8.messages import Reply
from minisgl.stage8.sse import DONE, Choice, Usage, error_events

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


class Answer(Response):
    """An ASGI response that owns its requests: they are open while it is being sent, and no longer."""

    def __init__(self, frontend: Frontend, call: Call) -> None:
        super().__init__()
        self._frontend, self._call = frontend, call
        self._begun = False  # the status line is on its way
        self._started: set[int] = set()  # choices
        self._usage = Usage()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._frontend.ask(self._call.requests) as ask:
                await _while_connected(self._send(ask, send), receive)
        except Exception as error:
            failure = as_api_error(error)
            if self._begun:
                await _write(send, error_events(failure.body), last=True)
            else:
                await failure.response(scope, receive, send)

    async def _send(self, ask: Ask, send: Send) -> None:
        await ask.begun(range(0, len(self._call.requests), self._call.n))  # the first choice of each prompt
        if self._call.stream:
            await self._stream(ask, send)
        else:
            await self._whole(ask, send)

    async def _stream(self, ask: Ask, send: Send) -> None:
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        form, continuous = self._call.format, self._call.continuous_usage
        async for replies in ask:
            frames: list[bytes] = []
            for index, reply in replies:
                is_first = index not in self._started
                if is_first:
                    self._start(index, reply)
                self._usage.completion_tokens += len(reply.token_ids)
                if continuous:
                    form.count(self._usage)
                frames += form.events(index, reply, is_first)
            if frames:
                await _write(send, b"".join(frames))
        usage = form.usage(self._usage) if self._call.include_usage else b""
        await _write(send, usage + DONE, last=True)

    async def _whole(self, ask: Ask, send: Send) -> None:
        choices = [Choice() for _ in self._call.requests]
        async for replies in ask:
            for index, reply in replies:
                choices[index].add(reply)
                if index not in self._started:
                    self._start(index, reply)
                self._usage.completion_tokens += len(reply.token_ids)
        body = self._call.format.whole(choices, self._usage)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _write(send, body, last=True)

    def _start(self, index: int, reply: Reply) -> None:
        """The first reply to this choice. A prompt counts once, however many choices it has."""
        self._started.add(index)
        if index % self._call.n == 0:
            self._usage.prompt_tokens += reply.prompt_tokens
            self._usage.cached_tokens += reply.cached_tokens


async def _write(send: Send, data: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not last})


async def _while_connected(work: Coroutine[None, None, None], receive: Receive) -> None:
    """Run `work` to its end, or until the client is gone. Raises what it raises."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
