"""The whole server but the model: `python -m minisgl.benchmark instant`. Requests and streamed tokens a second, and
which process takes the time, with an engine that answers at once.

Knows nothing of what the processes do: their CPU time is read from the system (Linux), the client's beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from minisgl.benchmark import http_load
from minisgl.benchmark.decode_step import int_list
from minisgl.benchmark.http_load import Server
from minisgl.benchmark.records import add_output_arguments, record, save, table
from minisgl.benchmark.stages import ready_port

MODEL = "smollm2-135m"
FLAGS = ["--port", "0", "--disable-overlap", "--log-level", "error", "--max-queued-requests", "4096"]
PROCESSES = ("API", "scheduler", "text")
MILLION = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int_list, default=[1, 16, 64], metavar="N,N", help="requests at once")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--requests", type=int, default=200, help="requests of one token, for requests a second")
    parser.add_argument("--profile", metavar="FILE", help="write cProfile's statistics of the API's process here")
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    if min([args.tokens, args.requests, *args.streams]) < 1:
        raise ValueError("--streams, --tokens and --requests must be at least 1")
    return asyncio.run(_main(args))


async def _main(args: argparse.Namespace) -> int:
    header = ["streams", "requests/s", "tokens/s", *(f"{name}, µs/token" for name in (*PROCESSES, "client"))]
    rows, saved = [header], []
    async with running(args.profile) as (server, pids):
        await burst(server, 1, 8)  # the first request is dearer than the others
        for streams in args.streams:
            numbers = await measure(server, pids, streams, args.requests, args.tokens)
            rows.append([str(streams), *(f"{value:,.1f}" for value in numbers.values())])
            saved += [
                record("instant", MODEL, f"streams={streams} tokens={args.tokens}", name, unit, value)
                for (name, value), unit in zip(numbers.items(), ["1/s"] * 2 + ["us"] * 4, strict=True)
            ]
    print(table(rows))
    save(args, saved)
    return 0


async def measure(server: Server, pids: list[int], streams: int, requests: int, tokens: int) -> dict[str, float]:
    seconds = 0.0
    for _ in range(0, requests, streams):
        seconds += await burst(server, streams, 1)
    before = [*map(cpu_seconds, pids), sum(os.times()[:2])]
    elapsed = await burst(server, streams, tokens)
    after = [*map(cpu_seconds, pids), sum(os.times()[:2])]
    of_all = streams * tokens
    each = [(end - start) / of_all * MILLION for start, end in zip(before, after, strict=True)]
    rounds = len(range(0, requests, streams))
    named = dict(zip((f"{name.lower()}_cpu" for name in (*PROCESSES, "client")), each, strict=True))
    return {"requests": rounds * streams / seconds, "throughput": of_all / elapsed, **named}


async def burst(server: Server, streams: int, tokens: int) -> float:
    """Seconds until all streams have ended."""
    texts = [f"Question {index}" for index in range(streams)]
    _, elapsed = await http_load.chat(server, MODEL, texts, tokens, 0.0)
    return elapsed


@contextlib.asynccontextmanager
async def running(profile: str | None) -> AsyncIterator[tuple[Server, list[int]]]:
    """The server, and the processes of PROCESSES."""
    profiler = ["-m", "cProfile", "-o", profile] if profile else []
    command = [*profiler, "-m", "minisgl.benchmark.instant_server", *FLAGS]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=subprocess.PIPE)
    try:
        port = await ready_port(process)
        yield Server("127.0.0.1", port), [process.pid, *sorted(children(process.pid))]
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 60)


def children(pid: int) -> list[int]:
    """Of all its threads."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def cpu_seconds(pid: int) -> float:
    """Of all its threads, to the nanosecond: Linux has a clock for each process (clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | 2)
