"""An engine that answers at once with what a test wants, in the place of the other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from minisgl.stage8.codec import encode
from minisgl.stage8.messages import Abort, Heartbeat, Message, Replies, Reply, Tokenize


def reply(uid: int, text: str = "", finish: str | None = None, tokens: int = 1, **more: object) -> Reply:
    facts = {"prompt_tokens": 5, "cached_tokens": 2, **more}
    return Reply(uid, text, [7] * tokens, finish, **facts)  # type: ignore[arg-type]


def hello(request: Tokenize) -> list[Reply]:
    return [reply(request.uid, "Hel"), reply(request.uid, "lo", "stop", 2)]


class FakeRing:
    """Both ends of the ring. Each reply travels as a message of its own, as from as many steps."""

    def __init__(self, answer: Callable[[Any], list[Reply]] = hello) -> None:
        self.answer = answer
        self.sent: list[Message] = []
        self._replies: asyncio.Queue[bytes] = asyncio.Queue()

    @property
    def requests(self) -> list[Tokenize]:
        return [message for message in self.sent if isinstance(message, Tokenize)]

    @property
    def aborted(self) -> list[int]:
        return [message.uid for message in self.sent if isinstance(message, Abort)]

    def send(self, message: Message) -> None:
        self.sent.append(message)
        if not isinstance(message, Abort):
            self.give(*self.answer(message))

    def give(self, *replies: Reply) -> None:
        for one in replies:
            self.put(encode(Replies([one])))

    def beat(self, **stats: int) -> None:
        self.put(encode(Heartbeat(0, stats)))

    def put(self, data: bytes) -> None:
        self._replies.put_nowait(data)

    async def each(self, take: Callable[[bytes], None]) -> None:
        while True:
            take(await self._replies.get())
