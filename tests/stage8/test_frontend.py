"""Every request gets its own replies, and nothing of it outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from fake_ring import FakeRing, reply

from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.stage8.ask import MAX_UNREAD, Ask, EngineGone, RequestFailed, RequestRefused
from minisgl.stage8.codec import encode
from minisgl.stage8.errors import as_api_error
from minisgl.stage8.frontend import Frontend, QueueFull
from minisgl.stage8.messages import Replies, Reply, Tokenize

Test = Callable[[Frontend, FakeRing], Awaitable[None]]


def silent(request: Tokenize) -> list:
    return []


@asynccontextmanager
async def listening(ring: FakeRing, tokenizers: list | None = None, max_open: int = 8) -> AsyncIterator[Frontend]:
    frontend = Frontend(tokenizers or [ring], ring, max_open, Tracer(None))
    task = asyncio.create_task(frontend.listen())
    try:
        yield frontend
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def requests(frontend: Frontend, count: int = 1) -> list[Tokenize]:
    return [Tokenize(uid=frontend.new_uid(), params=SamplingParams(), text="a") for _ in range(count)]


async def texts(ask: Ask, count: int = 1) -> list[str]:
    found = [""] * count
    async for replies in ask:
        for index, one in replies:
            found[index] += one.text
    return found


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_interleaved_replies_reach_their_own_request() -> None:
    async def test() -> None:
        ring = FakeRing(silent)
        async with listening(ring) as frontend:
            with frontend.ask(requests(frontend, 2)) as two, frontend.ask(requests(frontend)) as one:
                ring.give(reply(2, "x"), reply(0, "a"), reply(1, "A"), reply(0, "b", "stop"), reply(2, "y", "length"))
                ring.give(reply(1, "B", "stop"))
                assert await texts(two, 2) == ["ab", "AB"]
                assert await texts(one) == ["xy"]
            assert frontend.num_open == 0
            assert ring.aborted == []

    asyncio.run(test())


def test_a_slow_reader_gets_all_that_has_come_in_one_list() -> None:
    async def test() -> None:
        ring = FakeRing(lambda request: [reply(request.uid, c) for c in "abc"] + [reply(request.uid, "d", "stop")])
        async with listening(ring) as frontend:
            with frontend.ask(requests(frontend)) as ask:
                await settle()
                assert [one.text for _, one in await anext(ask)] == list("abcd")
                assert [replies async for replies in ask] == []

    asyncio.run(test())


def test_what_a_reader_leaves_unread_stays_small_and_whole() -> None:
    """Replies to two choices; the reader takes the first, and the rest at the end."""

    async def test() -> None:
        ring = FakeRing(silent)
        async with listening(ring) as frontend:
            with frontend.ask(requests(frontend, 2)) as ask:
                ring.give(reply(0, "first"))
                await anext(ask)
                pieces = [f"{i} " for i in range(10 * MAX_UNREAD)]
                for piece in pieces:
                    ring.give(reply(0, piece), reply(1, piece, tokens=2))
                    await settle()
                    assert len(ask._arrived) <= MAX_UNREAD
                ring.give(reply(0, "end", "stop"), reply(1, "end", "length"))
                found: dict[int, list[Reply]] = {0: [], 1: []}
                async for replies in ask:
                    for index, one in replies:
                        found[index].append(one)
            for index, reason, tokens in ((0, "stop", 1), (1, "length", 2)):
                assert "".join(one.text for one in found[index]) == "".join([*pieces, "end"])
                assert sum(len(one.token_ids) for one in found[index]) == tokens * len(pieces) + 1
                assert [one.finish_reason for one in found[index] if one.finish_reason] == [reason]

    asyncio.run(test())


def test_leaving_early_aborts_once_and_late_replies_are_counted() -> None:
    async def test() -> None:
        ring = FakeRing(silent)
        async with listening(ring) as frontend:
            with frontend.ask(requests(frontend, 2)) as ask:
                ring.give(reply(0, "a", "stop"), reply(1, "b"))
                await anext(ask)
            ask.close()
            assert ring.aborted == [1], "the finished one needs no abort, the other exactly one"
            assert frontend.num_open == 0
            ring.give(reply(1, "late"), reply(1, finish="abort", tokens=0))
            await settle()
            assert frontend.late == 2
            with frontend.ask(requests(frontend)) as again:
                assert list(again._open) == [2], "a uid is never used again"

    asyncio.run(test())


def test_cancelling_the_reader_aborts() -> None:
    async def test() -> None:
        ring = FakeRing(silent)
        async with listening(ring) as frontend:

            async def read() -> None:
                with frontend.ask(requests(frontend)) as ask:
                    await texts(ask)

            task = asyncio.create_task(read())
            await settle()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert ring.aborted == [0]
            assert frontend.num_open == 0

    asyncio.run(test())


def test_one_tokenizer_gets_all_messages_of_a_request() -> None:
    async def test() -> None:
        ring, tokenizers = FakeRing(silent), [FakeRing(silent) for _ in range(3)]
        async with listening(ring, tokenizers) as frontend:
            frontend.ask(requests(frontend, 7)).close()
        for index, tokenizer in enumerate(tokenizers):
            mine = [uid for uid in range(7) if uid % 3 == index]
            assert [request.uid for request in tokenizer.requests] == mine
            assert tokenizer.aborted == mine

    asyncio.run(test())


def test_a_refusal_comes_after_the_replies_before_it() -> None:
    async def test() -> None:
        ring = FakeRing(silent)
        async with listening(ring) as frontend:
            with frontend.ask(requests(frontend, 2)) as ask:
                ring.give(reply(0, "a"), reply(1, tokens=0, error="too long", param="prompt"))
                await settle()
                assert [one.text for _, one in await anext(ask)] == ["a"]
                with pytest.raises(RequestRefused, match="too long") as refusal:
                    await anext(ask)
                assert refusal.value.param == "prompt"
            assert ring.aborted == [0]

    asyncio.run(test())


def test_hazard_22_our_fault_is_500_and_what_still_runs_of_it_is_aborted() -> None:
    async def test() -> None:
        ring = FakeRing(silent)
        async with listening(ring) as frontend:
            with frontend.ask(requests(frontend)) as ask:
                ring.give(reply(0, tokens=0, error="the detokenizer failed", is_bug=True))
                with pytest.raises(RequestFailed) as failure:
                    await anext(ask)
            assert as_api_error(failure.value).status == 500
            assert ring.aborted == [0]
            assert frontend.num_open == 0

    asyncio.run(test())


def test_begun_waits_for_the_named_requests_and_takes_nothing() -> None:
    async def test() -> None:
        ring = FakeRing(silent)
        async with listening(ring) as frontend:
            with frontend.ask(requests(frontend, 4)) as ask:
                begun = asyncio.create_task(ask.begun([0, 2]))
                ring.give(reply(0, "a"), reply(3, "d"))
                await settle()
                assert not begun.done()
                ring.give(reply(2, "c"))
                await begun
                assert [one.text for _, one in await anext(ask)] == ["a", "d", "c"]

    asyncio.run(test())


def test_when_the_engine_is_gone_all_fail_now_and_later() -> None:
    async def test() -> None:
        ring = FakeRing(silent)
        async with listening(ring) as frontend:
            waiting = [asyncio.create_task(texts(frontend.ask(requests(frontend)))) for _ in range(3)]
            await settle()
            frontend.fail_all("the scheduler died")
            for result in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(result, EngineGone)
                assert str(result) == "the scheduler died"
            with pytest.raises(EngineGone):
                frontend.ask(requests(frontend))
            assert frontend.num_open == 0
            assert ring.aborted == []

    asyncio.run(test())


def test_an_abort_nobody_asked_for_is_an_error() -> None:
    async def test() -> None:
        ring = FakeRing(lambda request: [reply(request.uid, finish="abort", tokens=0)])
        async with listening(ring) as frontend:
            with pytest.raises(EngineGone), frontend.ask(requests(frontend)) as ask:
                await anext(ask)
            assert ring.aborted == []

    asyncio.run(test())


def test_no_more_are_open_than_may_be() -> None:
    async def test() -> None:
        ring = FakeRing(silent)
        async with listening(ring, max_open=3) as frontend:
            with frontend.ask(requests(frontend, 2)):
                with pytest.raises(QueueFull):
                    frontend.ask(requests(frontend, 2))
                assert len(ring.requests) == 2, "nothing of a call that does not fit is sent"
                frontend.ask(requests(frontend)).close()
            frontend.ask(requests(frontend, 3)).close()
            with pytest.raises(RequestRefused, match="at most 3"):
                frontend.ask(requests(frontend, 4))

    asyncio.run(test())


def test_bytes_that_are_no_message_are_counted_and_hurt_nobody() -> None:
    async def test() -> None:
        ring = FakeRing()
        async with listening(ring) as frontend:
            for data in (b"", b"\xc1", b"\x80", encode(Replies([]))[:-1], encode(requests(frontend)[0])):
                ring.put(data)
            with frontend.ask(requests(frontend)) as ask:
                assert await texts(ask) == ["Hello"]
            assert frontend.malformed == 5

    asyncio.run(test())


def test_heartbeats_bring_the_schedulers_numbers() -> None:
    async def test() -> None:
        ring = FakeRing()
        async with listening(ring) as frontend:
            assert not frontend.heard.is_set()
            ring.beat(pages_free=3)
            await frontend.heard.wait()
            assert frontend.stats == {"pages_free": 3}
            assert frontend.heartbeat_age < 100

    asyncio.run(test())
