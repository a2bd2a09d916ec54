"""Stage 8's exercises, each claim in words: malformed messages, text from tokens, stop strings, routing, aborts.

They hold for the package's own code; `minisgl check 8` runs them on a learner's. Nothing here starts a process: the
ring is a list of what was sent, and replies are handed over by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from minisgl.core.detokenizer import MAX_TOKENS, IncrementalDetokenizer
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.stage8.ask import Ask, EngineGone, RequestFailed, RequestRefused
from minisgl.stage8.codec import MalformedMessage, MessageDecoder, encode
from minisgl.stage8.frontend import Frontend
from minisgl.stage8.messages import (
    TO_SCHEDULER,
    TO_TOKENIZER,
    Abort,
    Generate,
    Message,
    Replies,
    Reply,
    StopMatched,
    Tokenize,
)
from minisgl.stage8.stop_strings import StopStrings

# 8.1 malformed messages

ABORT = encode(Abort(1))
CHAT = encode(Tokenize(1, SamplingParams(), chat=[{"a": 1}]))
MALFORMED = {
    "nothing": b"",
    "noise": b"\xff\x00\xfe",
    "half a message": ABORT[:-1],
    "a message and a byte more": ABORT + b"\x00",
    "a kind for another process": encode(Replies([])),
    "text in the place of a uid": msgspec.msgpack.encode({"type": "Abort", "uid": "one"}),
    "a prompt of 3 bytes, which is no int32 ids": encode(Generate(1, b"", SamplingParams())).replace(
        b"prompt\xc4\x00", b"prompt\xc4\x03abc"
    ),
    "a parameter over its limit": msgspec.msgpack.encode(
        {"type": "Generate", "uid": 1, "prompt": b"", "params": {"temperature": -1}}
    ),
    "50,000 lists in each other": CHAT.replace(b"\xa1a\x01", b"\xa1a" + b"\x91" * 50_000 + b"\x01"),
}


def decoder() -> MessageDecoder:
    return MessageDecoder(TO_TOKENIZER | TO_SCHEDULER)


def test_a_message_is_decoded() -> None:
    sent = Generate.of(7, [1, 2, 300], SamplingParams(max_tokens=3))
    came = decoder().decode(encode(sent))
    assert came == sent, f"what was encoded is decoded again: {came!r:.200} is not {sent!r:.200}"


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_no_message_is_malformed(what: str) -> None:
    try:
        came = decoder().decode(MALFORMED[what])
    except MalformedMessage:
        return
    except Exception as error:
        raise AssertionError(
            f"{what}: MalformedMessage and nothing else is to be raised, and {type(error).__name__} was: the process "
            f"would end. ({error!s:.80})"
        ) from error
    raise AssertionError(f"{what}: that is no message, and was taken for {came!r:.80}")


def test_what_was_wrong_is_said() -> None:
    with pytest.raises(MalformedMessage) as caught:
        decoder().decode(MALFORMED["text in the place of a uid"])
    words = str(caught.value)
    assert "uid" in words, f"who reads the log needs the decoder's words, which name the field: {words!r}"


def test_those_that_are_messages_are_served() -> None:
    received = [ABORT, MALFORMED["noise"], encode(StopMatched(2)), MALFORMED["half a message"], encode(Abort(3))]
    found = decoder().decode_all(received)
    assert found == [Abort(1), StopMatched(2), Abort(3)], f"3 of 5 are messages, and come in their order: {found}"


def test_those_that_are_none_are_counted() -> None:
    kinds = decoder()
    kinds.decode_all([ABORT, MALFORMED["noise"], MALFORMED["nothing"]])
    kinds.decode_all([MALFORMED["half a message"], ABORT])
    assert kinds.malformed == 3, f"2 were none, then 1: self.malformed is 3, not {kinds.malformed}"


# 8.2 text from tokens


class ByteTokenizer:
    """A token is a byte; 256 ends the text; 257 to 260 are words. The first space of a text is dropped, as
    SentencePiece's decoders do. decoded: how many tokens it was given, in all."""

    special_ids = frozenset({256})
    vocab_size = 261

    def __init__(self) -> None:
        self.words = {257: " a", 258: " cat", 259: " sat", 260: "\n"}
        self.decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        assert max(ids, default=0) < self.vocab_size, (
            f"ids from vocab_size, {self.vocab_size}, on have no text and never enter the window: {list(ids)[-4:]}"
        )
        data = b"".join(self.words[i].encode() if i in self.words else bytes([i]) for i in ids if i < 256 or i > 256)
        return data.decode(errors="replace").removeprefix(" ")


def text_of(*ids: int) -> tuple[IncrementalDetokenizer, ByteTokenizer, list[str]]:
    tokenizer = ByteTokenizer()
    text = IncrementalDetokenizer(tokenizer)  # type: ignore[arg-type]
    return text, tokenizer, [text.add(token_id) for token_id in ids]


def test_a_letter_comes_with_its_token() -> None:
    _, _, pieces = text_of(*b"sat")
    assert pieces == ["s", "a", "t"], f"a letter is certain at once: its piece is the new text, not {pieces}"


def test_a_character_comes_with_its_last_token() -> None:
    _, _, pieces = text_of(*"🍕!🍕".encode())
    expected = ["", "", "", "🍕", "!", "", "", "", "🍕"]
    assert pieces == expected, (
        f"🍕 is four tokens here: the first three give '' and never half a character. {expected}, not {pieces}"
    )


def test_a_space_between_words_stays() -> None:
    _, _, pieces = text_of(258, 259, 257, 258)
    assert "".join(pieces) == "cat sat a cat", (
        f"the decoder drops the space of what comes first: a token decoded by itself loses it. {pieces}"
    )


def test_a_token_without_text_gives_none() -> None:
    _, _, pieces = text_of(257, 256, 999, 261, 258)
    assert pieces == ["a", "", "", "", " cat"], (
        f"end-of-sequence (256) and ids over the vocabulary (261, 999) have no text, and do no harm: {pieces}"
    )


def test_the_rest_comes_at_the_end() -> None:
    text, _, pieces = text_of(*b"ok", *"🍕".encode()[:2])
    rest = text.finish()
    assert pieces == ["o", "k", "", ""], f"half a character waits: {pieces}"
    assert rest == "\ufffd", f"the answer ended within a character: finish gives what is there, not {rest!r}"


def test_the_end_gives_nothing_twice() -> None:
    text, _, pieces = text_of(*b"ok")
    rest = text.finish()
    assert rest == "", f"all was given out already, {pieces}: finish gives what was not yet, and not {rest!r}"


def test_bytes_that_are_wrong_for_good_do_not_wait() -> None:
    _, _, pieces = text_of(*[0x80] * 8, *b"ok")
    assert "".join(pieces) == "\ufffd" * 8 + "ok", f"8 wrong bytes, then letters: all comes, {pieces}"


def test_the_window_stays_short() -> None:
    text, tokenizer, _ = text_of(258, 259)
    text.add(257)
    tokenizer.decoded = 0
    pieces = "".join(text.add(258 + i % 3) for i in range(600))
    limit = 600 * (MAX_TOKENS + 20)
    assert tokenizer.decoded < limit, (
        f"600 tokens, and {tokenizer.decoded} were decoded for them: with more than {MAX_TOKENS} in the window, "
        f"self._shorten(text) forgets the first. All of them each time is quadratic"
    )
    assert pieces == " cat sat\n" * 200, "and the text is the same"


# 8.3 stop strings


def streamed(strings: list[str], *pieces: str, free: int = 0) -> tuple[list[str], str | None]:
    """What was let out for each piece, and what the last one still let out if a string ended the text. free: so many
    pieces come before one may."""
    stop, out = StopStrings(strings), list[str]()
    for number, piece in enumerate(pieces):
        before = stop.end(piece) if number >= free else None
        if before is not None:
            return out, before
        out.append(stop.take(piece))
    return out, None


def test_text_that_begins_none_passes() -> None:
    out, end = streamed(["\n\n", "END"], "a ", "cat", " sat")
    assert (out, end) == (["a ", "cat", " sat"], None), f"nothing here begins a stop string, all passes: {out}, {end}"


def test_the_beginning_of_one_is_held() -> None:
    out, end = streamed(["END"], "the E", "N", "d")
    assert (out, end) == (["the ", "", "ENd"], None), (
        f"'E' and 'EN' may become 'END' and are held; with 'd' they cannot, and come: ['the ', '', 'ENd'], not {out}"
    )
    out, _ = streamed(["END"], "E", "x", "y")
    assert out == ["", "Ex", "y"], f"'Ex' has come and is no longer held: it does not come a second time. {out}"


def test_no_more_is_held_than_must_be() -> None:
    out, _ = streamed(["abac"], "xaba", "b")
    assert out == ["x", "ab"], (
        f"of 'xaba' the end 'aba' begins 'abac'; of 'abab' only 'ab' does, so the first two letters come: {out}"
    )


def test_one_that_comes_in_pieces_ends_the_text() -> None:
    out, end = streamed(["world"], "Hello", " w", "or", "ld!")
    assert (out, end) == (["Hello", " ", ""], ""), (
        f"'world' came in three pieces, and nothing of it may be shown: {out}, then {end!r}"
    )


def test_what_is_before_it_comes() -> None:
    _, end = streamed(["STOP"], "a cat", " sat. STOP and more")
    assert end == " sat. ", f"the last piece lets out what stands before 'STOP': ' sat. ', not {end!r}"


def test_what_was_held_comes_before_another_string() -> None:
    out, end = streamed(["END", "!"], "the E", "!")
    assert (out, end) == (["the "], "E"), (
        f"'E' was held for 'END', and '!' ends the text: what was held comes, 'E', after 'the ': {out}, then {end!r}"
    )


def test_the_first_to_be_complete_ends_the_text() -> None:
    _, end = streamed(["abc", "b"], "xabcx")
    assert end == "xa", f"read letter by letter, 'b' is complete before 'abc' is: 'xa' is left, not {end!r}"


def test_of_two_complete_together_the_longer_is_cut() -> None:
    _, end = streamed(["b", "ab"], "xab")
    assert end == "x", f"'b' and 'ab' are complete with the same letter: the longer one is cut off: 'x', not {end!r}"


def test_a_piece_that_ends_nothing_changes_nothing() -> None:
    stop = StopStrings(["END"])
    assert stop.end("the E") is None
    out = stop.take("the E")
    assert out == "the ", f"`end` looked and said None; `take` gets the same piece then: 'the ', not {out!r}"


def test_what_did_not_count_does_not_count_later() -> None:
    out, end = streamed(["ab", "abab"], "ab", "x", free=1)
    assert (out, end) == (["", "abx"], None), (
        f"'ab' came while nothing might end yet (min_tokens), and is held only as the beginning of 'abab': it is no "
        f"end when 'x' comes. Shown: {out}, ended: {end!r}"
    )


# 8.4 routing


class Sent(list[Message]):
    """A tokenizer's outbox."""

    def send(self, message: Message) -> None:
        self.append(message)

    @property
    def aborts(self) -> list[int]:
        return [message.uid for message in self if isinstance(message, Abort)]


def make_frontend() -> tuple[Frontend, Sent]:
    sent = Sent()
    return Frontend([sent], None, 8, Tracer(None)), sent  # type: ignore[arg-type]  # replies come by hand


def ask(frontend: Frontend, count: int = 1) -> Ask:
    return frontend.ask([Tokenize(frontend.new_uid(), SamplingParams(), text="a") for _ in range(count)])


def reply(uid: int, text: str = "", reason: Any = None, **more: Any) -> Reply:
    return Reply(uid, text, [7], reason, 5, 0, **more)


async def pieces(asked: Ask) -> list[tuple[int, str]]:
    return [(index, one.text) async for replies in asked for index, one in replies]


def read(asked: Ask, words: str) -> list[tuple[int, str]]:
    """To its end, which must come."""
    try:
        return asyncio.run(asyncio.wait_for(pieces(asked), 3))
    except asyncio.TimeoutError:
        raise AssertionError(f"{words}: whoever reads it waits for ever") from None


def failure(asked: Ask) -> Exception | None:
    try:
        read(asked, "it has failed")
    except Exception as error:
        return error
    return None


def test_replies_reach_their_own_request() -> None:
    frontend, _ = make_frontend()
    two, one = ask(frontend, 2), ask(frontend)
    frontend._take(Replies([reply(2, "x"), reply(0, "a"), reply(1, "A"), reply(2, "y", "length")]))
    frontend._take(Replies([reply(0, "b", "stop"), reply(1, "B", "stop")]))
    found = read(two, "both of its requests have ended"), read(one, "its request has ended")
    expected = [(0, "a"), (1, "A"), (0, "b"), (1, "B")], [(0, "x"), (0, "y")]
    assert found == expected, (
        f"uids 0 and 1 are one call's, 2 is another's; each reads its own, by index: {expected}, not {found}"
    )


def test_a_reply_without_text_is_one_too() -> None:
    frontend, _ = make_frontend()
    asked = ask(frontend)
    frontend._take(Replies([reply(0, "", "stop")]))
    found = read(asked, "its request has ended")
    assert found == [(0, "")], (
        f"an end-of-sequence token has no text, but its reply says why the answer ended: {found} is read"
    )


def test_who_waits_is_woken() -> None:
    async def scene() -> list[tuple[int, str]]:
        frontend, _ = make_frontend()
        reader = asyncio.create_task(pieces(ask(frontend)))
        for text, reason in (("a", None), ("b", "stop")):
            await asyncio.sleep(0.01)
            frontend._take(Replies([reply(0, text, reason)]))
        return await asyncio.wait_for(reader, 3)

    try:
        found = asyncio.run(scene())
    except asyncio.TimeoutError:
        raise AssertionError("the reader sleeps on self._wake: a reply that has come must set it") from None
    assert found == [(0, "a"), (0, "b")], f"{found}"


def test_a_first_reply_ends_the_silence() -> None:
    """HTTP sends its status when each request has a reply: until then it can still say 400."""

    async def scene() -> None:
        frontend, _ = make_frontend()
        asked = ask(frontend, 2)
        waiting = asyncio.create_task(asked.begun([0, 1]))
        await asyncio.sleep(0.01)
        frontend._take(Replies([reply(1, "A"), reply(0, "a")]))
        await asyncio.wait_for(waiting, 3)
        assert len(await anext(asked)) == 2, "begun takes no reply: both are there to be read"

    try:
        asyncio.run(scene())
    except asyncio.TimeoutError:
        raise AssertionError(
            "both requests have a reply, and are still in self._silent: the stream never begins"
        ) from None


def test_the_last_reply_closes_the_request() -> None:
    frontend, sent = make_frontend()
    asked = ask(frontend, 2)
    frontend._take(Replies([reply(0, "a"), reply(1, "b", "length")]))
    assert frontend.num_open == 1, (
        f"uid 1 has ended (finish_reason) and uid 0 has not: 1 request is open, not {frontend.num_open}"
    )
    frontend._take(Replies([reply(0, "c", "stop")]))
    assert frontend.num_open == 0, f"both have ended: none is open, not {frontend.num_open}"
    asked.close()
    assert sent.aborts == [], f"what has ended is not aborted: {sent.aborts}"


def test_a_late_reply_harms_nobody() -> None:
    frontend, _ = make_frontend()
    asked = ask(frontend)
    try:
        frontend._take(Replies([reply(77, "late"), reply(0, "a", "stop"), reply(0, "after its end")]))
    except KeyError as error:
        raise AssertionError("uid 77 is nobody's (any more): its replies are late, and not an error") from error
    assert frontend.late == 2, f"two replies came that nobody waits for: self.late is 2, not {frontend.late}"
    assert read(asked, "uid 0 has ended") == [(0, "a")], "those before and after a late one arrive"


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"error": "max_tokens is too large", "param": "max_tokens"}, RequestRefused),
        ({"error": "9 tokens", "param": "prompt", "code": "context_length_exceeded"}, RequestRefused),
        ({"error": "the detokenizer failed", "is_bug": True}, RequestFailed),
        ({"reason": "abort"}, EngineGone),
    ],
    ids=["refused", "refused with a code", "a bug", "aborted by the server"],
)
def test_how_a_request_fails(more: dict[str, Any], error: type[Exception]) -> None:
    frontend, sent = make_frontend()
    bad, good = ask(frontend), ask(frontend)
    frontend._take(Replies([reply(0, **more), reply(1, "fine", "stop")]))
    raised = failure(bad)
    assert type(raised) is error, f"{more}: {error.__name__} is to be raised by reading it, and {raised!r} was"
    assert more.get("error", "") in str(raised), f"whoever reads it is told why: {more['error']!r}, not {raised!r}"
    assert getattr(raised, "param", None) == more.get("param"), "a refusal names the field at fault"
    assert getattr(raised, "code", None) == more.get("code"), "reply.code is for programs: they tell a refusal by it"
    assert read(good, "the other one has ended") == [(0, "fine")], "one request fails, and the others go on"
    assert frontend.num_open == 0, "a failure is a request's end too"
    assert sent.aborts == ([0] if error is RequestFailed else []), (
        f"after a bug in the detokenizer the scheduler still computes: that request, and only such a one, is aborted; "
        f"{sent.aborts} were"
    )


# 8.5 aborts


def test_leaving_aborts_what_is_open() -> None:
    frontend, sent = make_frontend()
    asked = ask(frontend, 3)
    frontend._take(Replies([reply(0, "a", "stop"), reply(1, "b")]))
    asked.close()
    assert sent.aborts == [1, 2], f"uid 0 has ended; 1 and 2 are open and are aborted: [1, 2], not {sent.aborts}"
    assert frontend.num_open == 0, f"and forgotten: {frontend.num_open} are still open"


def test_leaving_twice_aborts_once() -> None:
    frontend, sent = make_frontend()
    asked = ask(frontend, 2)
    asked.close()
    asked.close()
    frontend.abort(1)
    assert sent.aborts == [0, 1], f"an abort is sent once, however often it is asked for: [0, 1], not {sent.aborts}"


def test_what_is_not_open_is_not_aborted() -> None:
    frontend, sent = make_frontend()
    try:
        frontend.abort(5)
    except KeyError as error:
        raise AssertionError("uid 5 was never sent: to abort it is no error, and sends nothing") from error
    assert sent.aborts == [], f"uid 5 was never sent: there is nothing to abort, and {sent.aborts} was"


def test_an_abort_is_counted_once() -> None:
    frontend, _ = make_frontend()
    asked = ask(frontend, 2)
    frontend._take(Replies([reply(0, "a", "stop")]))
    asked.close()
    ended = {reason: count for reason, count in frontend.metrics.ended.items() if count}
    assert ended == {"stop": 1, "abort": 1}, f"one came to its end and one was aborted, in the metrics too: {ended}"


def test_what_comes_after_an_abort_is_late() -> None:
    frontend, _ = make_frontend()
    asked = ask(frontend)
    asked.close()
    frontend._take(Replies([reply(0, "too late")]))
    assert frontend.late == 1, "the scheduler had sent a token before it heard of the abort: that reply is late"


def test_who_waits_is_let_go() -> None:
    async def scene() -> list[tuple[int, str]]:
        frontend, _ = make_frontend()
        asked = ask(frontend)
        reader = asyncio.create_task(pieces(asked))
        await asyncio.sleep(0.01)
        asked.close()
        return await asyncio.wait_for(reader, 3)

    try:
        found = asyncio.run(scene())
    except asyncio.TimeoutError:
        raise AssertionError("a reader that waits when the call is closed waits for ever: wake it") from None
    assert found == [], f"{found}"


def test_what_an_abort_sets_off_finds_all_closed() -> None:
    """Whoever hears of an abort may close the same call again, as an error on the way out does."""
    aborted: list[int] = []

    def abort(uid: int) -> None:
        aborted.append(uid)
        assert len(aborted) < 10, "close comes back to itself for ever: forget what was open before you abort it"
        asked.close()

    asked = Ask([4, 5], abort)
    asked.close()
    assert aborted == [4, 5], f"each once, in order: {aborted}"
