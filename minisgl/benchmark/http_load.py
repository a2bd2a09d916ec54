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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.benchmark.records import percentiles

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
    cached_tokens: int = 0  # of the prompt, from usage: found in the prefix cache

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
    bodies = completions(model, prompts, [max_tokens] * len(prompts), 0.0)
    return await send_all(Server("127.0.0.1", port), "/v1/completions", bodies)


def completions(
    model: str, prompts: list[list[int]], output_lens: Sequence[int], temperature: float
) -> list[dict[str, Any]]:
    """What is sent to /v1/completions."""
    return [
        {"model": model, "prompt": prompt, **_settings(output_len, temperature)}
        for prompt, output_len in zip(prompts, output_lens, strict=True)
    ]


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


Outcome = Answer | OSError | RuntimeError


async def send_timed(
    server: Server,
    path: str,
    bodies: list[dict[str, Any]],
    times: Sequence[float],
    ended: Callable[[Outcome], None],
) -> tuple[list[Outcome], float]:
    """Each at its own time, in seconds from now. One that fails leaves its error, as `send_all` would raise it, and
    hinders no other. ended: told of each when it is over."""
    requests = [server.request(path, body) for body in bodies]
    start = time.perf_counter()

    async def one(request: bytes, at: float) -> Outcome:
        await asyncio.sleep(start + at - time.perf_counter())
        outcome: Outcome
        try:
            outcome = await _send(server, request)
        except (OSError, RuntimeError) as error:
            outcome = error
        ended(outcome)
        return outcome

    outcomes = await asyncio.gather(*map(one, requests, times))
    return outcomes, time.perf_counter() - start


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Output tokens a second, and percentiles of TTFT, TPOT and ITL in milliseconds. Raises ValueError when there are
    none."""
    found = {"throughput": sum(answer.output_tokens for answer in answers) / seconds}
    times = {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [answer.tpot for answer in answers if answer.output_tokens > 1],
        "itl": list(itertools.chain.from_iterable(answer.gaps for answer in answers)),
    }
    for name, values in times.items():
        if not values:
            raise ValueError(
                f"no answer came in more than one chunk, so there is no {name.upper()}: ask for longer ones"
            )
        found |= {f"{name}_{q}": value * 1e3 for q, value in percentiles(values).items()}
    return found


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
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(first - start, gaps, last - start, tokens, self._usage.get("prompt_tokens", 0), cached)

    def _finish(self, complete: bool) -> None:
        if not self.done.done():
            self._complete = complete
            self.done.set_result(None)
