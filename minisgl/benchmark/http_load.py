"""Streams of completions against an OpenAI-compatible server, timed on the client's side. Knows no engine.

Speaks HTTP by hand: on a machine with few cores a client library would take time away from the server it measures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """Definitions: API contract, section 5. Times in seconds."""

    ttft: float  # request start to first content chunk
    gaps: list[float]  # between content chunks
    elapsed: float
    output_tokens: int  # from usage


async def run(port: int, model: str, prompts: list[list[int]], max_tokens: int) -> tuple[list[Answer], float]:
    """All prompts at once. Returns their answers and the wall time of the whole."""
    start = time.perf_counter()
    answers = await asyncio.gather(*(complete(port, model, prompt, max_tokens) for prompt in prompts))
    return list(answers), time.perf_counter() - start


async def complete(port: int, model: str, prompt: list[int], max_tokens: int) -> Answer:
    """One streamed completion. Raises RuntimeError with the server's words when it is refused."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_post("/v1/completions", body))
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the server said {status.decode().strip()}: {(await reader.read(2000)).decode()}")
        return await _read_stream(reader, start)
    finally:
        writer.close()


def _post(path: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload


async def _read_stream(reader: asyncio.StreamReader, start: float) -> Answer:
    """Only the last chunk but one, which has the usage, is parsed: the others are only timed."""
    times: list[float] = []
    tokens = 0
    async for line in reader:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            break
        if b'"choices":[]' in line.replace(b" ", b""):
            tokens = json.loads(line[len(b"data: ") :])["usage"]["completion_tokens"]
        else:
            times.append(time.perf_counter())
    if not times:
        raise RuntimeError("the stream ended without a chunk")
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return Answer(times[0] - start, gaps, times[-1] - start, tokens)
