"""Streaming chat against a server, ours or another's, with N streams at once: TTFT, TPOT, ITL and throughput.

python -m minisgl.benchmark serving --model qwen3-0.6b --streams 1,64,256 [any setting of the server] [--save]
python -m minisgl.benchmark serving --url http://127.0.0.1:30000 --model qwen3-0.6b
python -m minisgl.benchmark serving --replay FILE ...: the requests of a trace instead, see replay.py

This process is the client and nothing else. Definitions: API contract, section 5.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from minisgl.benchmark import http_load, replay
from minisgl.benchmark.decode_step import int_list
from minisgl.benchmark.http_load import Answer, Server
from minisgl.benchmark.records import add_output_arguments, save, table
from minisgl.benchmark.served import model_card, served
from minisgl.benchmark.target import Target, add_engine_arguments, target
from minisgl.benchmark.workload import texts
from minisgl.stage8.server_config import ServerConfig

HEADER = ["streams", "tokens/s", *(f"{name} {q}" for name in ("TTFT", "TPOT", "ITL") for q in ("p50", "p90", "p99"))]
PROBES = 8  # chats of a length, to find out how many tokens a word has


@dataclass(frozen=True)
class Client:
    """words: of each message, so that with the chat template it has about the tokens that were asked for."""

    server: Server
    model: str
    words: int
    output_len: int
    temperature: float

    async def burst(self, streams: int, seed: str, output_len: int | None = None) -> tuple[list[Answer], float]:
        messages = texts(streams, self.words, seed)
        return await http_load.chat(self.server, self.model, messages, output_len or self.output_len, self.temperature)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int_list, default=[1, 64, 256], metavar="N,N", help="requests at once")
    parser.add_argument("--input-len", type=int, default=915, help="prompt tokens of each, about")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--repeat", type=int, default=3, help="times that all streams are started; answers are pooled")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--url", help="a server that runs already; the engine's settings are then its own")
    replay.add_arguments(parser)
    add_output_arguments(parser)
    add_engine_arguments(parser, ServerConfig)


def main(args: argparse.Namespace) -> int:
    if min([args.input_len, args.output_len - 1, args.repeat, *args.streams]) < 1:
        raise ValueError("--streams, --input-len and --repeat must be at least 1, --output-len at least 2")
    subject = Target(args.model, {"tp": args.tp}, ServerConfig) if args.url else target(args, ServerConfig)
    try:
        return replay.main(args, subject) if args.replay else asyncio.run(_main(args, subject))
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def _main(args: argparse.Namespace, subject: Target) -> int:
    rows, saved = [HEADER], []
    async with served(args, subject) as server:
        model = (await asyncio.to_thread(model_card, server))["id"]
        words = await words_for(server, model, args.input_len)
        client = Client(server, model, words, args.output_len, args.temperature)
        for streams in args.streams:
            print(f"{streams} streams ...", end=" ", file=sys.stderr, flush=True)
            await client.burst(streams, f"warm-up {streams}", min(8, args.output_len))
            found, setting = await measure(client, streams, args.repeat)
            rows.append(_row(streams, found))
            setting |= {"server": args.url} if args.url else {}
            saved += [
                subject.record("serving", name, "tokens/s" if name == "throughput" else "ms", value, **setting)
                for name, value in found.items()
            ]
    print(table(rows))
    save(args, saved)
    return 0


async def measure(client: Client, streams: int, repeat: int) -> tuple[dict[str, float], dict[str, Any]]:
    """All streams at once, `repeat` times. Returns numbers (ms, tokens/s) and what they were measured with."""
    answers: list[Answer] = []
    seconds, busy = 0.0, time.process_time()
    for number in range(repeat):
        some, wall = await client.burst(streams, f"{streams} {number}")
        answers += some
        seconds += wall
    busy = (time.process_time() - busy) / seconds
    print(f"{len(answers)} answers in {seconds:.2f} s; this client was busy {busy:.0%} of it", file=sys.stderr)
    found = http_load.figures(answers, seconds)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    setting: dict[str, Any] = {"streams": streams, "input_len": prompt_tokens // len(answers)}
    setting |= {"output_len": client.output_len, "answers": len(answers), "temperature": client.temperature}
    if prompt_tokens == 0:
        print("the server sends no usage: its chunks were counted instead of tokens", file=sys.stderr)
        setting["counted"] = "chunks"
    return found, setting


async def words_for(server: Server, model: str, input_len: int) -> int:
    """How many words make a chat of about input_len tokens: chats of few words and of many are sent, and their usage is
    extrapolated. Several of each, since words have 3 to 7 letters; a tokenizer makes about 6 tokens of one at most."""
    many = max(20, input_len // 6)
    few = many // 10
    lengths = []
    for words in (few, many):
        answers, _ = await http_load.chat(server, model, texts(PROBES, words, "length"), 2, 0.0)
        lengths.append(statistics.mean(answer.prompt_tokens for answer in answers))
    if lengths[0] == 0:
        print("the server sends no usage: a word is taken for 6 tokens", file=sys.stderr)
        return max(1, input_len // 6)
    each = (lengths[1] - lengths[0]) / (many - few)
    return max(1, round(few + (input_len - lengths[0]) / each))


def _row(streams: int, found: dict[str, float]) -> list[str]:
    return [
        str(streams),
        *(f"{value:,.0f}" if name == "throughput" else f"{value:.2f}" for name, value in found.items()),
    ]
