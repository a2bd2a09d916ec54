"""Streams of answers from an OpenAI-compatible server, timed on the client's side. Knows no engine.

Speaks HTTP by hand, on one event loop and without a task for each stream: a client library would take more time for a
chunk than the server that it measures. Servers that write one event into several HTTP chunks are not understood.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SECONDS_OF_SILENCE = 300.0
_CONTENT = re.compile(rb'"(?:content|text)": ?"(?!")')  # a role, an end and a usage have none
_USAGE = re.compile(rb'"usage": ?\{')


@dataclass(frozen=True)
class Answer:
    """Definitions: API contract, section 5. Times in seconds."""

    ttft: float  # request start to first content chunk
    gaps: list[float]  # between content chunks (ITL)
    elapsed: float  # request start to last content chunk
    output_tokens: int  # from usage; of a server that sends none: content chunks
    prompt_tokens: int  # from usage, else 0

    @property
    def tpot(self) -> float:
        """Time per output token after the first."""
        return (self.elapsed - self.ttft) / max(1, self.output_tokens - 1)


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    api_key: str | None = None

    def request(self, path: str, body: dict[str, Any]) -> bytes:
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return head.encode() + f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload


async def run(port: int, model: str, prompts: list[list[int]], max_tokens: int) -> tuple[list[Answer], float]:
    """Completions of all prompts at once. Returns their answers and the wall time of the whole."""
    bodies = [{"model": model, "prompt": prompt, **_settings(max_tokens, 0.0)} for prompt in prompts]
    return await send_all(Server("127.0.0.1", port), "/v1/completions", bodies)


async def chat(
    server: Server, model: str, texts: Sequence[str], max_tokens: int, temperature: float
) -> tuple[list[Answer], float]:
    """One user's message each, all at once. Returns their answers and the wall time of the whole."""
    settings = {"model": model, **_settings(max_tokens, temperature)}
    bodies = [{"messages": [{"role": "user", "content": text}], **settings} for text in texts]
    return await send_all(server, "/v1/chat/completions", bodies)


async def send_all(server: Server, path: str, bodies: list[dict[str, Any]]) -> tuple[list[Answer], float]:
    """Raises RuntimeError with the server's words when one is refused or breaks off, OSError when nobody listens."""
    requests = [server.request(path, body) for body in bodies]
    start = time.perf_counter()
    answers = await asyncio.gather(*(_send(server, request) for request in requests))
    return list(answers), time.perf_counter() - start


def _settings(max_tokens: int, temperature: float) -> dict[str, Any]:
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _send(server: Server, request: bytes) -> Answer:
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    transport, stream = await loop.create_connection(lambda: _Stream(loop), server.host, server.port)
    try:
        transport.write(request)
        while not stream.done.done():
            before = len(stream.times)
            await asyncio.wait([stream.done], timeout=SECONDS_OF_SILENCE)
            if len(stream.times) == before and not stream.done.done():
                raise RuntimeError(f"the server has sent nothing for {SECONDS_OF_SILENCE:.0f} s")
        return stream.answer(start)
    finally:
        transport.close()


class _Stream(asyncio.Protocol):
    """Looks for what a line has in it, and parses only the one with the usage."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done = loop.create_future()
        self.times: list[float] = []  # of content chunks
        self._usage: dict[str, Any] = {}
        self._head: bytes | None = None
        self._rest = b""  # of a line that has still to end
        self._error: bytes | None = None  # the server's, after the stream had begun
        self._complete = False

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._head is None:
                self._head = line
            elif not line.startswith(b"data: "):
                continue
            elif _CONTENT.search(line):
                self.times.append(now)
            elif line.startswith(b"data: [DONE]"):
                self._finish(self._error is None)
            elif line.startswith(b'data: {"error"'):
                self._error = line
            if _USAGE.search(line):
                self._usage = json.loads(line[len(b"data: ") :])["usage"]

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(False)

    def answer(self, start: float) -> Answer:
        if not self._complete or not self.times:
            said = b" ".join((self._head or b"nothing", self._error or self._rest))[:1000]
            raise RuntimeError(f"no whole stream; the server said: {said.decode(errors='replace')}")
        gaps = [after - before for before, after in itertools.pairwise(self.times)]
        tokens = self._usage.get("completion_tokens", len(self.times))
        first, last = self.times[0], self.times[-1]
        return Answer(first - start, gaps, last - start, tokens, self._usage.get("prompt_tokens", 0))

    def _finish(self, complete: bool) -> None:
        if not self.done.done():
            self._complete = complete
            self.done.set_result(None)
