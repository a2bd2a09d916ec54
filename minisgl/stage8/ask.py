"""The replies to requests that were sent off together, as they come. Knows nothing of how they come.

It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from msgspec.structs import replace

from minisgl.learn import exercise
from minisgl.stage8.messages import Reply

MAX_UNREAD = 64  # replies that wait for a slow reader, before those to one request are made one


class RequestRefused(ValueError):
    """The request itself is at fault. param: the field that is, if one is. code: OpenAI's word for why."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class RequestFailed(RuntimeError):
    """The server failed on this request, which is a bug in it. It serves the others."""


class EngineGone(RuntimeError):
    """The engine ended this request, or cannot take any."""


class Ask:
    """Requests that were sent off together, and their replies as they come.

    Iterating gives lists of (index of the request, reply): all that has arrived since, so a slow reader gets longer
    lists. Raises RequestRefused, RequestFailed or EngineGone when one of the requests fails, after the replies before
    that. Use it in a `with`; leaving it aborts what has not ended.
    """

    def __init__(self, uids: Sequence[int], abort: Callable[[int], None]) -> None:
        """abort: called with each uid that has not ended when it is left."""
        self._abort = abort
        self._open = {uid: index for index, uid in enumerate(uids)}
        self._silent = set(self._open.values())  # those without any reply yet
        self._arrived: list[tuple[int, Reply]] = []
        self._merge_at = MAX_UNREAD
        self._failure: Exception | None = None
        self._wake = asyncio.Event()

    def __aiter__(self) -> Ask:
        return self

    async def __anext__(self) -> list[tuple[int, Reply]]:
        while not self._arrived:
            if self._failure is None and not self._open:
                raise StopAsyncIteration
            await self._more()
        arrived, self._arrived, self._merge_at = self._arrived, [], MAX_UNREAD
        return arrived

    async def begun(self, indices: Iterable[int]) -> None:
        """Wait until each of these requests has a reply, taking none. Raises as iterating does."""
        while not self._silent.isdisjoint(indices):
            await self._more()

    async def _more(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._wake.clear()
        await self._wake.wait()

    @exercise("8.4")
    def put(self, reply: Reply) -> bool:
        """Take in a reply to one of the open requests. Returns whether it was the last of that request."""
        terminal = reply.error is not None or reply.finish_reason is not None
        index = self._open.pop(reply.uid) if terminal else self._open[reply.uid]
        if reply.error is not None:
            refused = RequestRefused(reply.error, reply.param, reply.code)
            self._failure = RequestFailed(reply.error) if reply.is_bug else refused
        elif reply.finish_reason == "abort":
            self._failure = EngineGone("the server ended this request before it was finished")
        else:
            self._silent.discard(index)
            self._keep(index, reply)
        self._wake.set()
        return terminal

    def _keep(self, index: int, reply: Reply) -> None:
        """Until the reader comes. What a slow one leaves is merged now and then."""
        self._arrived.append((index, reply))
        if len(self._arrived) >= self._merge_at:
            self._arrived = merged(self._arrived)
            self._merge_at = len(self._arrived) + MAX_UNREAD

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._open.clear()
        self._wake.set()

    @exercise("8.5")
    def close(self) -> None:
        """Abort what has not ended. May be called twice, and never waits: it is safe while being cancelled."""
        uids = list(self._open)
        self._open.clear()
        self._wake.set()
        for uid in uids:
            self._abort(uid)

    def __enter__(self) -> Ask:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def merged(arrived: Iterable[tuple[int, Reply]]) -> list[tuple[int, Reply]]:
    """One reply for each request, as if all of it had come in one step. A reply of a few characters takes a hundred
    times their memory, and a client that does not read can have thousands of them wait."""
    of_index: dict[int, list[Reply]] = {}
    for index, reply in arrived:
        of_index.setdefault(index, []).append(reply)
    return [(index, _joined(replies)) for index, replies in of_index.items()]


def _joined(replies: Sequence[Reply]) -> Reply:
    text = "".join(reply.text for reply in replies)
    token_ids = [token_id for reply in replies for token_id in reply.token_ids]
    logprobs = [logprob for reply in replies for logprob in reply.logprobs]
    return replace(replies[-1], text=text, token_ids=token_ids, logprobs=logprobs)
