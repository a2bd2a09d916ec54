"""What a streamed token costs between the engine and the client's socket: `python -m minisgl.benchmark messaging`.

The way of a token through scheduler, detokenizer and API, with real sockets, the API's event loop, and all that is done
to it but the model's work and HTTP. Beside it the plain way: a message of the standard library's JSON for each token
and each hop, over the same sockets, which the API awaits with `zmq.asyncio`.
All of it runs in one process on one core, and its CPU time is counted: what else the machine does hardly matters.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import zmq
import zmq.asyncio

from minisgl.benchmark.messaging_ways import Hop, Ours, Plain, Way
from minisgl.core.detokenizer import IncrementalDetokenizer
from minisgl.core.tokenizer import Tokenizer
from minisgl.models.resolve import resolve_model
from minisgl.stage8.codec import MessageDecoder, encode
from minisgl.stage8.messages import TO_API, Heartbeat

TEXT = "The quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak tree. "


async def microseconds(way: Way, ids: Sequence[int], size: int, repeats: int) -> float:
    """CPU time of a token: the best of so many times all ids."""
    tasks = [asyncio.create_task(task) for task in way.tasks()]
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for token_id in ids:
            way.send(token_id)
            await way.clients.served()
        times.append((time.process_time() - start) / len(ids) / size * 1e6)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return min(times)


def measure(make: Callable[..., Way], tokenizer: Tokenizer, ids: Sequence[int], size: int, repeats: int) -> float:
    with hops(zmq.asyncio.Context if make is Plain else zmq.Context) as both:
        return asyncio.run(microseconds(make(tokenizer, both, size), ids, size, repeats))


@contextmanager
def one_core() -> Iterator[None]:
    """A thread that wakes on another core costs several times as much, or not, as it happens."""
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def hops(receiving: type[zmq.Context]) -> Iterator[list[Hop]]:
    """To the detokenizer, and to the API."""
    with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:
        both = [Hop(f"ipc://{folder}/detokenizer"), Hop(f"ipc://{folder}/api", receiving)]
        try:
            yield both
        finally:
            for hop in both:
                hop.close()


def hopping(repeats: int, messages: int = 1000) -> float:
    """A message's way from one process into the next, and nothing else."""
    with hops(zmq.Context) as (hop, _):

        def once() -> float:
            start = time.process_time()
            for _ in range(messages):
                hop.sender.send(bytes(100))
                hop.receiver.recv()
            return (time.process_time() - start) / messages * 1e6

        return best(once, repeats)


def detokenizing(tokenizer: Tokenizer, ids: Sequence[int]) -> float:
    """That part of both ways which is the same."""
    text = IncrementalDetokenizer(tokenizer)
    start = time.process_time()
    for token_id in ids:
        text.add(token_id)
    return (time.process_time() - start) / len(ids) * 1e6


def best(measure: Callable[[], float], repeats: int) -> float:
    return min(measure() for _ in range(repeats))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument("--repeats", type=int, default=5, help="the best of so many is shown")


def main(args: argparse.Namespace) -> int:
    with one_core():
        return _main(args)


def _main(args: argparse.Namespace) -> int:
    tokenizer = Tokenizer.from_folder(resolve_model(args.model))
    ids = tokenizer.encode(TEXT)[:20] * 10
    text, hop = best(lambda: detokenizing(tokenizer, ids), args.repeats), hopping(args.repeats)
    print(
        f"CPU time of a token in µs. Both ways: {text:.1f} for its text, {hop:.1f} for each message and hop through ZMQ"
    )
    print("requests   ours   without metrics   a JSON message a token a hop   ours / that")
    for size in (1, 4, 16, 64):
        few = ids[: max(20, len(ids) // size)]
        times = [
            measure(way, tokenizer, few, size, args.repeats) for way in (Ours, partial(Ours, metrics=False), Plain)
        ]
        print(f"{size:8d} {times[0]:6.1f} {times[1]:17.1f} {times[2]:30.1f} {times[0] / times[2]:13.2f}", flush=True)
    beat = Heartbeat(0, {f"number_{i}": i for i in range(14)}, [0.1] * 20)
    micros = best(lambda: _beat(beat), args.repeats)
    print(f"a heartbeat, each second and when requests came or went: {micros:.1f} µs to write and read three times")
    return 0


def _beat(beat: Heartbeat) -> float:
    decoder = MessageDecoder(TO_API)
    start = time.process_time()
    for _ in range(300):
        decoder.decode(encode(beat))
    return (time.process_time() - start) / 100 * 1e6
