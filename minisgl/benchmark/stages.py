"""Every stage by what it is for, each in a fresh process, beside transformers: a table, and JSON lines.

python -m minisgl.benchmark stages [--dtype bfloat16] [--threads 2] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from minisgl.benchmark import http_load
from minisgl.benchmark.records import record, table, write
from minisgl.benchmark.workload import Workload
from minisgl.core.config import Config
from minisgl.core.threads import usable_cores

MODEL = "smollm2-135m"
OFFLINE, SERVED = "stage 7", "stage 8, HTTP"  # the same engine and loop, without and with the server around it
RESULTS = Path(__file__).parent / "results" / "stages.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=min(2, usable_cores()), help="of each measured process")
    parser.add_argument("--stages", default="1,2,3,4,5,6,7,8", help="which, with commas between")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON lines are appended here")


def main(args: argparse.Namespace) -> None:
    stages = [int(number) for number in args.stages.split(",") if number in tuple("12345678")]
    if len(stages) < args.stages.count(",") + 1:
        raise ValueError(f"--stages must be numbers from 1 to 8 with commas between, not {args.stages!r:.80}")
    Config(threads=args.threads)  # raises ValueError before the first of many processes does
    found: dict[str, dict[str, float]] = {}
    for who, numbers in measured(stages, args.dtype, args.threads):
        if who == SERVED and OFFLINE in found:
            numbers["share_of_offline_pct"] = 100 * numbers["batch_tok_s"] / found[OFFLINE]["batch_tok_s"]
        found[who] = numbers
        write(args.out, records(who, numbers, f"dtype={args.dtype} threads={args.threads}"))  # whatever comes after
    print(table(rows(found)))
    print(f"\nappended to {args.out}", file=sys.stderr)


def measured(stages: list[int], dtype: str, threads: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Each stage, then transformers: its name and what was found."""
    common = ["--dtype", dtype, "--threads", str(threads)]
    for stage in stages:
        if stage < 8:
            yield f"stage {stage}", child("measure", [*common, "--stage", str(stage)])
        if stage == 6 and torch.cuda.device_count() != 1:  # ranks have a GPU each, or share the CPU
            yield "stage 6, tp 2", child("measure", ["--dtype", dtype, "--threads", "1", "--stage", "6", "--tp", "2"])
        if stage == 8:
            yield SERVED, asyncio.run(serve_and_load(dtype, threads))
    yield "transformers", child("transformers_baseline", common)


def child(module: str, arguments: list[str]) -> dict[str, float]:
    """Run a measurement in a process of its own. Exits with its words when it fails."""
    start = time.perf_counter()
    print(f"{module} {' '.join(arguments)} ...", end=" ", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", f"minisgl.benchmark.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"\n{done.stderr}")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1])


async def serve_and_load(dtype: str, threads: int) -> dict[str, float]:
    """Start the server, time it to its first answer, then send it what the other stages were given."""
    start = time.perf_counter()
    command = [
        "-m",
        "minisgl.stage8",
        "--port",
        "0",
        "--dtype",
        dtype,
        "--threads",
        str(threads),
        "--max-seq-len",
        "4096",
    ]
    server = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    try:
        port = await ready_port(server)
        load = Workload()
        await http_load.run(port, MODEL, load.prompts()[:1], 1)
        found = {"start_to_first_answer_s": time.perf_counter() - start}
        one, _ = await http_load.run(port, MODEL, load.prompts()[:1], load.output_len)
        found["one_stream_tok_s"] = one[0].output_tokens / one[0].elapsed
        await http_load.run(port, MODEL, load.prompts(), 2)
        answers, seconds = await http_load.run(port, MODEL, load.prompts(), load.output_len)
        found["batch_tok_s"] = sum(answer.output_tokens for answer in answers) / seconds
        return found
    finally:
        server.terminate()
        await asyncio.wait_for(server.wait(), 60)


async def ready_port(server: asyncio.subprocess.Process) -> int:
    """From the server's one ready line; then go on reading, so that it never blocks on a full pipe."""
    assert server.stderr is not None
    said = b""
    async for line in server.stderr:
        said += line
        if b"ready: http://" in line:
            asyncio.get_running_loop().create_task(server.stderr.read())
            return int(line.split(b"://", 1)[1].split(b":", 1)[1].split(b"/", 1)[0])
    raise RuntimeError(f"the server ended before it was ready: {said.decode()[-2000:]}")


def records(who: str, numbers: dict[str, float], setting: str) -> list[dict[str, Any]]:
    tp = 2 if "tp 2" in who else 1
    return [
        record("stages", MODEL, f"{setting} of={who.replace(' ', '_')}", name, unit(name), value, tp)
        for name, value in numbers.items()
    ]


def unit(name: str) -> str:
    endings = {"_tok_s": "tokens/s", "_ms": "ms", "_s": "s", "_pct": "%", "bytes": "bytes"}
    return next(text for end, text in endings.items() if end in name)


def rows(found: dict[str, dict[str, float]]) -> list[list[str]]:
    names = list(dict.fromkeys(name for numbers in found.values() for name in numbers))
    header = ["", *names]
    return [header, *([who, *(f"{n[name]:.4g}" if name in n else "" for name in names)] for who, n in found.items())]
