"""A trace against a server: each request at its own time, at several speeds, with and without a prefix cache.

python -m minisgl.benchmark serving --replay qwen_traceA_blksz_16.jsonl --model qwen3-32b --tp 4 --caches naive,radix

Prompts are ids made of the trace's hashes: two have the same tokens as far as their hashes are the same, and others
from there on. Answers have the trace's lengths and not its text, so nobody finds an answer in the cache. Requests that
are longer than the server allows are left out. After mini-sglang's bench_qwen.py, whose prompts all begin alike.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import resource
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from minisgl.benchmark import http_load
from minisgl.benchmark.arrivals import Arrival
from minisgl.benchmark.bailian_trace import synthetic_trace
from minisgl.benchmark.http_load import Answer, Outcome, Server
from minisgl.benchmark.records import save, table
from minisgl.benchmark.served import flush_cache, model_card, served
from minisgl.benchmark.target import Target
from minisgl.benchmark.trace_file import parse_trace, read_trace
from minisgl.benchmark.workload import FIRST_ORDINARY_ID, LAST_ORDINARY_ID

SCALES = [0.4, 0.5, 0.6, 0.7, 0.8, 1.6]
PATH = "/v1/completions"
WARM_UP = 8  # requests, and tokens of each
TIMES = [(name, q) for name in ("ttft", "itl") for q in ("p50", "p90", "p99")]
HEADER = ["cache", "scale", "tokens/s", *(f"{n.upper()} {q}" for n, q in TIMES), "cached", "failed", "left out"]
UNITS = {"throughput": "tokens/s", "run": "s", "cached": "%", "failed": "requests", "left_out": "requests"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a trace in place of streams")
    group.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="JSON lines of Qwen-Bailian or Mooncake; when there is no such file, a synthetic trace is made",
    )
    group.add_argument("--requests", type=int, default=1000, metavar="N", help="of the trace, from its beginning")
    group.add_argument(
        "--time-scale",
        type=float_list,
        default=SCALES,
        metavar="X,X",
        help="of the trace's times: 0.5 is twice as fast, 0 all at once; one run each, with an empty cache",
    )
    group.add_argument(
        "--caches",
        type=lambda text: text.split(","),
        metavar="NAME,NAME",
        help="a server for each of these --cache; default: one, with that of --cache",
    )


def float_list(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main(args: argparse.Namespace, subject: Target) -> int:
    if args.requests < 1:
        raise ValueError(f"--requests {args.requests} must be at least 1")
    for scale in args.time_scale:
        if not 0 <= scale < math.inf:
            raise ValueError(f"--time-scale {scale:g} must be at least 0 and finite")
    if args.caches and args.url:
        raise ValueError("--caches is for servers that are started here: leave it out, or --url")
    known = next(f.metadata["choices"] for f in dataclasses.fields(subject.config_class) if f.name == "cache")
    for cache in args.caches or ():
        if cache not in known:
            raise ValueError(f"each of --caches must be {' or '.join(known)}, not {cache!r:.200}")
    subjects = [subject.but(cache=cache) for cache in args.caches] if args.caches else [subject]
    arrivals, name = load(args.replay, args.requests)
    _allow_connections(len(arrivals))
    return asyncio.run(_main(args, subjects, arrivals, name))


def load(path: Path, requests: int) -> tuple[list[Arrival], str]:
    """The requests, and what to call them."""
    if path.exists():
        return read_trace(path, requests), path.name
    print(f"there is no {path}: replaying a synthetic trace (seed 0), which is kept nowhere", file=sys.stderr)
    lines = [json.dumps(row) for row in synthetic_trace(requests)]
    return parse_trace(lines, "the synthetic trace", requests), "synthetic"


def prompt(arrival: Arrival, vocab_size: int | None = None) -> list[int]:
    """Its tokens, none of them special: those stand at one end of a vocabulary or the other. None: it is not known."""
    ids = min(LAST_ORDINARY_ID, (vocab_size or LAST_ORDINARY_ID * 2) * 3 // 4) - FIRST_ORDINARY_ID
    return [FIRST_ORDINARY_ID + token_id for token_id in arrival.prompt_ids(ids)]


async def _main(args: argparse.Namespace, subjects: list[Target], arrivals: list[Arrival], name: str) -> int:
    rows = [HEADER]
    try:
        for subject in subjects:
            async with served(args, subject) as server:
                async for row in replay(args, subject, server, arrivals, name):
                    rows.append(row)
    finally:  # what was measured took minutes
        if len(rows) > 1:
            why = "" if args.replay.exists() else f", since there is no {args.replay}"
            print(f"trace: {name}{why}\n\n{table(rows)}")
    return 0


async def replay(
    args: argparse.Namespace, subject: Target, server: Server, arrivals: list[Arrival], name: str
) -> AsyncIterator[list[str]]:
    """Lines of the table, one for each time scale; each is saved as soon as it is measured."""
    setting = {"trace": name, "temperature": args.temperature}
    setting |= {"server": args.url} if args.url else {"cache": subject.config.cache}
    cache = setting.get("cache", "its own")
    card = await asyncio.to_thread(model_card, server)
    fitting = fit(arrivals, card.get("max_model_len"))
    vocab_size = None if args.url else subject.model_config.vocab_size
    prompts = [prompt(arrival, vocab_size) for arrival in fitting]
    bodies = http_load.completions(card["id"], prompts, [a.output_len for a in fitting], args.temperature)
    few = [{**body, "max_tokens": min(WARM_UP, body["max_tokens"])} for body in bodies[:WARM_UP]]
    await http_load.send_all(server, PATH, few)
    for scale in args.time_scale:
        await _flush(dataclasses.replace(server, api_key=args.admin_key or server.api_key))
        print(f"{cache}, times x {scale:g}:", end=" ", file=sys.stderr, flush=True)
        found = await measure(server, bodies, [arrival.time_ns / 1e9 * scale for arrival in fitting])
        found["left_out"] = len(arrivals) - len(fitting)
        setting |= {"requests": len(bodies), "time_scale": scale}
        save(args, [subject.record("replay", n, UNITS.get(n, "ms"), value, **setting) for n, value in found.items()])
        yield _row(cache, scale, found)


def fit(arrivals: list[Arrival], limit: int | None) -> list[Arrival]:
    """Those of at most `limit` tokens, prompt and answer. Raises ValueError when there are none."""
    fitting = [arrival for arrival in arrivals if limit is None or arrival.max_len <= limit]
    if len(fitting) < len(arrivals):
        left_out = f"{len(arrivals) - len(fitting)} of {len(arrivals)} requests have more than {limit} tokens"
        if not fitting:
            remedy = "raise --max-seq-len or --num-pages, or take a model with more positions"
            raise ValueError(f"{left_out}, prompt and answer: {remedy}")
        print(f"{left_out}, prompt and answer, and are left out", file=sys.stderr)
    return fitting


async def measure(server: Server, bodies: list[dict[str, Any]], times: Sequence[float]) -> dict[str, float]:
    """Of those that were answered; how many were not is "failed", and the first error is shown. Raises RuntimeError
    when none was."""
    ended, busy = 0, time.process_time()

    def show(_: Outcome) -> None:
        nonlocal ended
        ended += 1
        if ended * 10 // len(bodies) > (ended - 1) * 10 // len(bodies):
            print(f"{100 * ended // len(bodies)}%", end=" ", file=sys.stderr, flush=True)

    outcomes, seconds = await http_load.send_timed(server, PATH, bodies, times, show)
    busy = (time.process_time() - busy) / seconds
    print(f"in {seconds:.1f} s; this client was busy {busy:.0%} of it", file=sys.stderr)
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    errors = [outcome for outcome in outcomes if not isinstance(outcome, Answer)]
    if errors:
        said = f"{len(errors)} of {len(outcomes)} requests failed, the first with: {errors[0]}"
        if not answers:
            raise RuntimeError(said)
        print(said, file=sys.stderr)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    cached = 100 * sum(answer.cached_tokens for answer in answers) / max(1, prompt_tokens)
    return http_load.figures(answers, seconds) | {"run": seconds, "cached": cached, "failed": len(errors)}


async def _flush(server: Server) -> None:
    try:
        await asyncio.to_thread(flush_cache, server)
    except OSError as error:
        print(f"the server keeps its cache ({error}): prompts of earlier runs may be found", file=sys.stderr)


def _allow_connections(count: int) -> None:
    """A server that falls behind has all of them open, and many systems allow a process 1,024 files. The server that is
    started inherits this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 1024 if hard == resource.RLIM_INFINITY else min(count + 1024, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _row(cache: str, scale: float, found: dict[str, float]) -> list[str]:
    times = [f"{found[f'{name}_{q}']:,.1f}" for name, q in TIMES]
    counts = [f"{found['cached']:.0f} %", f"{found['failed']:.0f}", f"{found['left_out']:.0f}"]
    return [cache, f"{scale:g}", f"{found['throughput']:,.0f}", *times, *counts]
