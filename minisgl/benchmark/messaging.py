"""What a streamed token costs between the engine and the client's socket: `python -m minisgl.benchmark messaging`.

The way of a token through scheduler, detokenizer and API, with real sockets and everything that is done to it but the
model's work and HTTP; beside it the plain way, a message of the standard library's JSON for each token and each hop.
All of it runs in one process, and its CPU time is counted: it does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from minisgl.core.detokenizer import IncrementalDetokenizer
from minisgl.core.tokenizer import Tokenizer
from minisgl.models.resolve import resolve_model
from minisgl.stage8.ask import Ask
from minisgl.stage8.detokenizer import DetokenizerRole
from minisgl.stage8.messages import TO_API, TO_DETOKENIZER, Heartbeat, MessageDecoder, Step, encode
from minisgl.stage8.metrics import Metrics
from minisgl.stage8.sse import ChatFormat

TEXT = "The quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak tree. "


class Hop:
    """A socket of each end, as between two processes."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self._sender, self._receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket in (self._sender, self._receiver):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self._receiver.bind(address)
        self._sender.connect(address)

    def __call__(self, data: bytes) -> bytes:
        self._sender.send(data)
        return self._receiver.recv()


class Ours:
    def __init__(self, tokenizer: Tokenizer, hops: Sequence[Hop], size: int, metrics: bool = True) -> None:
        self._role, self._hops, self._size = DetokenizerRole(tokenizer), hops, size
        self._metrics = Metrics() if metrics else None
        self._to_detokenizer, self._to_api = MessageDecoder(TO_DETOKENIZER), MessageDecoder(TO_API)
        self._asks = {uid: Ask([uid], lambda uid: None) for uid in range(size)}
        self._formats = [ChatFormat("m", False) for _ in range(size)]
        for uid in range(size):
            if self._metrics:
                self._metrics.begin(uid, time.monotonic())

    def step(self, token_id: int) -> int:
        """One token of each request. Returns the bytes for the clients."""
        size = self._size
        step = Step(list(range(size)), [token_id] * size, [None] * size, [0] * size, [9] * size)
        messages = [self._to_detokenizer.decode(self._hops[0](encode(step)))]
        (replies,) = [self._to_api.decode(self._hops[1](encode(one))) for one in self._role.handle(messages)]
        if self._metrics:
            self._metrics.take(replies.replies, time.monotonic())
        written = 0
        for reply in replies.replies:
            ask = self._asks[reply.uid]
            ask.put(reply)
            arrived, ask._arrived = ask._arrived, []
            frames = [self._formats[reply.uid].text(0, one.text, one.logprobs) for _, one in arrived if one.text]
            written += len(b"".join(frames))
        return written


class Plain:
    def __init__(self, tokenizer: Tokenizer, hops: Sequence[Hop], size: int) -> None:
        self._hops = hops
        self._texts = [IncrementalDetokenizer(tokenizer) for _ in range(size)]

    def step(self, token_id: int) -> int:
        written = 0
        for uid, text in enumerate(self._texts):
            facts: dict[str, Any] = {"uid": uid, "finish_reason": None, "cached_tokens": 0, "prompt_tokens": 9}
            sent = json.loads(self._hops[0](json.dumps({**facts, "token_id": token_id}).encode()))
            facts |= {"text": text.add(sent["token_id"]), "token_ids": [sent["token_id"]]}
            reply = json.loads(self._hops[1](json.dumps(facts).encode()))
            if reply["text"]:
                choice = {"index": 0, "delta": {"content": reply["text"]}, "logprobs": None, "finish_reason": None}
                head = {"id": "chatcmpl-0", "created": 0, "model": "m", "object": "chat.completion.chunk"}
                written += len(f"data: {json.dumps({**head, 'choices': [choice]})}\n\n".encode())
        return written


def microseconds(way: Ours | Plain, ids: Sequence[int], size: int) -> float:
    """CPU time of a token."""
    start = time.process_time()
    for token_id in ids:
        way.step(token_id)
    return (time.process_time() - start) / len(ids) / size * 1e6


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
    tokenizer = Tokenizer.from_folder(resolve_model(args.model))
    ids = tokenizer.encode(TEXT)[:20] * 10
    text = best(lambda: detokenizing(tokenizer, ids), args.repeats)
    print(f"CPU time of a token in µs; {text:.1f} of it is the detokenizer's, the same both ways")
    print("requests   ours   without metrics   a JSON message a token a hop   ours / that")
    with tempfile.TemporaryDirectory(prefix="minisgl-") as folder, zmq.Context() as context:
        hops = [Hop(context, f"ipc://{Path(folder) / name}") for name in ("detokenizer", "api")]
        for size in (1, 4, 16, 64):
            few = ids[: max(20, len(ids) // size)]
            parts = (tokenizer, hops, size)
            ways: list[Ours | Plain] = [Ours(*parts), Ours(*parts, False), Plain(*parts)]
            ours, bare, plain = (best(partial(microseconds, way, few, size), args.repeats) for way in ways)
            print(f"{size:8d} {ours:6.1f} {bare:17.1f} {plain:30.1f} {ours / plain:13.2f}", flush=True)
        context.destroy(linger=0)
    beat = Heartbeat(0, {f"number_{i}": i for i in range(14)}, [0.1] * 20)
    print(f"a heartbeat, once a second: {best(lambda: _beat(beat), args.repeats):.1f} µs to write and read three times")
    return 0


def _beat(beat: Heartbeat) -> float:
    decoder = MessageDecoder(TO_API)
    start = time.process_time()
    for _ in range(300):
        decoder.decode(encode(beat))
    return (time.process_time() - start) / 100 * 1e6
