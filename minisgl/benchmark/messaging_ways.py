"""Two ways of a streamed token from the scheduler to the client's frame: the server's, and the plain one.

They do the same for it. Knows nothing of how it is measured.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import zmq

from minisgl.core.detokenizer import IncrementalDetokenizer
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.tokenizer import Tokenizer
from minisgl.core.trace import Tracer
from minisgl.stage8.ask import Ask
from minisgl.stage8.codec import MessageDecoder
from minisgl.stage8.detokenizer import DetokenizerRole
from minisgl.stage8.frontend import Frontend
from minisgl.stage8.messages import TO_DETOKENIZER, Message, Step, Tokenize
from minisgl.stage8.metrics import Metrics
from minisgl.stage8.ring import RepliesInbox
from minisgl.stage8.sockets import Inbox, Outbox
from minisgl.stage8.sse import ChatFormat


class Hop:
    """A socket of each end, as between two processes."""

    def __init__(self, address: str, receiving: type[zmq.Context] = zmq.Context) -> None:
        """receiving: `zmq.asyncio.Context` for a receiver that an event loop awaits."""
        self._contexts = zmq.Context(), receiving()
        self.sender: Any = self._contexts[0].socket(zmq.PUSH)
        self.receiver: Any = self._contexts[1].socket(zmq.PULL)
        for socket in (self.sender, self.receiver):
            socket.set_hwm(0)
        self.receiver.bind(address)
        self.sender.connect(address)

    def close(self) -> None:
        for context in self._contexts:
            context.destroy(linger=0)


class Clients:
    """Takes the frames of all requests in the place of their sockets."""

    def __init__(self, size: int) -> None:
        self._size, self._waiting, self.written = size, size, 0
        self._all = asyncio.Event()

    def write(self, frames: bytes) -> None:
        """Of one token."""
        self.written += len(frames)
        self._waiting -= 1
        if not self._waiting:
            self._all.set()

    async def served(self) -> None:
        """Until each has got a token more."""
        await self._all.wait()
        self._waiting = self._size
        self._all.clear()


class Way(Protocol):
    """Of the tokens of some requests side by side. tasks: what the API's event loop runs for them."""

    clients: Clients

    def tasks(self) -> list[Coroutine[Any, Any, None]]: ...

    def send(self, token_id: int) -> None:
        """One token of each request: on its way to the API."""


class NoMetrics(Metrics):
    def take(self, *_: object) -> None: ...


class NoTokenizer:
    def send(self, message: Message) -> None:
        """What is asked is answered all the same."""


class Ours:
    """Every part is the server's own."""

    def __init__(self, tokenizer: Tokenizer, hops: Sequence[Hop], size: int, metrics: bool = True) -> None:
        tracer = Tracer(None)
        self._outbox, self._inbox = (
            Outbox(hops[0].sender, tracer),
            Inbox(hops[0].receiver, MessageDecoder(TO_DETOKENIZER)),
        )
        self._role, self._replies = DetokenizerRole(tokenizer), Outbox(hops[1].sender, tracer)
        self._frontend = Frontend([NoTokenizer()], RepliesInbox(hops[1].receiver), size, tracer)
        if not metrics:
            self._frontend.metrics = NoMetrics()
        self._size, self.clients = size, Clients(size)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        requests = [Tokenize(self._frontend.new_uid(), SamplingParams(max_tokens=1), "") for _ in range(self._size)]
        answers = [self._answer(self._frontend.ask([request])) for request in requests]
        return [self._frontend.listen(), *answers]

    def send(self, token_id: int) -> None:
        size = self._size
        self._outbox.send(Step(list(range(size)), [token_id] * size, [None] * size, [0] * size, [9] * size))
        for message in self._role.handle(self._inbox.receive()):
            self._replies.send(message)

    async def _answer(self, ask: Ask) -> None:
        form = ChatFormat("m", False)
        async for replies in ask:
            self.clients.write(b"".join(frame for _, one in replies for frame in form.events(0, one, False)))


class Plain:
    """The second hop's receiver is awaited."""

    def __init__(self, tokenizer: Tokenizer, hops: Sequence[Hop], size: int) -> None:
        self._hops = hops
        self._texts = [IncrementalDetokenizer(tokenizer) for _ in range(size)]
        self.clients = Clients(size)

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        queues: list[asyncio.Queue[dict[str, Any]]] = [asyncio.Queue() for _ in self._texts]
        return [self._listen(queues), *map(self._answer, queues)]

    def send(self, token_id: int) -> None:
        for uid in range(len(self._texts)):
            facts = {"uid": uid, "finish_reason": None, "cached_tokens": 0, "prompt_tokens": 9, "token_id": token_id}
            self._hops[0].sender.send(json.dumps(facts).encode())
            sent = json.loads(self._hops[0].receiver.recv())
            text, token_ids = self._texts[uid].add(sent["token_id"]), [sent.pop("token_id")]
            self._hops[1].sender.send(json.dumps({**sent, "text": text, "token_ids": token_ids}).encode())

    async def _listen(self, queues: Sequence[asyncio.Queue[dict[str, Any]]]) -> None:
        while True:
            reply = json.loads(await self._hops[1].receiver.recv())
            queues[reply["uid"]].put_nowait(reply)

    async def _answer(self, queue: asyncio.Queue[dict[str, Any]]) -> None:
        head = {"id": "chatcmpl-0", "created": 0, "model": "m", "object": "chat.completion.chunk"}
        while True:
            reply = await queue.get()
            choice = {"index": 0, "delta": {"content": reply["text"]}, "logprobs": None, "finish_reason": None}
            chunk = f"data: {json.dumps({**head, 'choices': [choice]})}\n\n" if reply["text"] else ""
            self.clients.write(chunk.encode())
