"""The client times content and nothing else, against servers whose every byte is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from minisgl.benchmark.http_load import Answer, Server, chat

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ROLE = b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null}'
END = b'{"choices":[{"delta":{},"finish_reason":"length"}],"usage":null}'
USAGE = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}'
PAUSE = 0.05


def content(text: str, spaced: bool = False) -> bytes:
    separators = (", ", ": ") if spaced else (",", ":")
    return json.dumps({"choices": [{"delta": {"content": text}}]}, separators=separators).encode()


def framed(*events: bytes) -> bytes:
    body = b"".join(b"data: " + event + b"\n\n" for event in events)
    return b"%x\r\n%b\r\n" % (len(body), body)


@asynccontextmanager
async def serving(writes: Sequence[bytes], seen: list[bytes]) -> AsyncIterator[Server]:
    """Answers each request with these writes, a pause before each but the first."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        seen.append(head + await reader.readexactly(length))
        for number, data in enumerate(writes):
            await asyncio.sleep(PAUSE if number else 0)
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield Server("127.0.0.1", server.sockets[0].getsockname()[1], "secret")


def ask(*writes: bytes, seen: list[bytes] | None = None, streams: int = 1) -> list[Answer]:
    async def run() -> list[Answer]:
        async with serving(writes, [] if seen is None else seen) as server:
            return (await chat(server, "m", ["hello"] * streams, 5, 0.0))[0]

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_only_content_counts() -> None:
    """A role before the first token, an end and a usage after the last are no tokens."""
    (answer,) = ask(HEAD + framed(ROLE), framed(content("a")), framed(content("b")), framed(END, USAGE, b"[DONE]"))
    assert len(answer.gaps) == 1
    assert answer.ttft >= PAUSE * 0.9, "the role came first, and is no content"
    assert answer.elapsed == pytest.approx(answer.ttft + sum(answer.gaps))
    assert (answer.output_tokens, answer.prompt_tokens) == (5, 7)
    assert answer.tpot == pytest.approx(answer.gaps[0] / 4)


def test_a_text_that_looks_like_an_event_is_one_chunk() -> None:
    (answer,) = ask(
        HEAD + framed(content('"content":"x" data: [DONE]\n"usage":{'), content("b", True), USAGE, b"[DONE]")
    )
    assert len(answer.gaps) == 1
    assert answer.output_tokens == 5


def test_events_may_come_in_pieces() -> None:
    whole = framed(content("a")) + framed(content("b"), USAGE, b"[DONE]")
    (answer,) = ask(HEAD + whole[:9], whole[9:60], whole[60:])
    assert len(answer.gaps) == 1
    assert answer.output_tokens == 5


def test_without_usage_chunks_are_counted() -> None:
    (answer,) = ask(HEAD + framed(content("a"), content("b"), END, b"[DONE]"))
    assert (answer.output_tokens, answer.prompt_tokens) == (2, 0)


def test_what_is_asked() -> None:
    seen: list[bytes] = []
    assert len(ask(HEAD + framed(content("a"), USAGE, b"[DONE]"), seen=seen, streams=3)) == 3
    head, body = seen[0].split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    fields = json.loads(body)
    assert fields["messages"] == [{"role": "user", "content": "hello"}]
    assert fields["max_tokens"] == 5
    assert fields["ignore_eos"]
    assert fields["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("writes", "words"),
    [
        ([b'HTTP/1.1 429 Too Many\r\ncontent-length: 20\r\n\r\n{"error": "too many"}'], "429 Too Many.*too many"),
        ([HEAD + framed(content("a"))], "no whole stream"),
        ([HEAD + framed(content("a"), b'{"error": {"message": "engine gone"}}', b"[DONE]")], "engine gone"),
        ([b""], "nothing"),
    ],
)
def test_what_is_no_answer_is_an_error(writes: list[bytes], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        ask(*writes)
