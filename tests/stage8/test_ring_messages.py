"""What the processes say to each other: it arrives as it was sent, and whatever else arrives does no harm."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from minisgl.core.outputs import TokenLogprob
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage8.codec import MalformedMessage, MessageDecoder, encode
from minisgl.stage8.messages import (
    TO_API,
    TO_DETOKENIZER,
    TO_SCHEDULER,
    TO_TOKENIZER,
    Abort,
    Answered,
    Begin,
    Decode,
    Encode,
    Flush,
    Generate,
    Heartbeat,
    Message,
    Rejected,
    Replies,
    Reply,
    Step,
    StopMatched,
    Tokenize,
)
from minisgl.stage8.text_logprob import TextLogprob, TokenText

KINDS: dict[str, Any] = {
    "tokenizer": TO_TOKENIZER,
    "scheduler": TO_SCHEDULER,
    "detokenizer": TO_DETOKENIZER,
    "api": TO_API,
}
PARAMS = SamplingParams(temperature=0.5, top_k=3, seed=7, max_tokens=2)
FULL = SamplingParams(logit_bias={5: 1.5}, stop_token_ids=(1, 2), logprobs=3, prompt_logprobs=True, min_tokens=1)
TOKEN = TokenText(5, "\ufffd", b"\xff")
MESSAGES: list[tuple[str, Message]] = [
    ("tokenizer", Tokenize(1, PARAMS, text="héllo 世界")),
    ("tokenizer", Tokenize(2, PARAMS, token_ids=[0, 2**31 - 1])),
    ("tokenizer", Tokenize(3, PARAMS, chat=[{"role": "user", "content": [{"text": "hi"}]}], fill_context=True)),
    ("tokenizer", Encode(4, "héllo", special=False)),
    ("tokenizer", Decode(5, [0, 49151])),
    ("tokenizer", Flush(6)),
    ("tokenizer", Abort(2**63 - 1)),
    ("scheduler", Generate.of(4, [0, 1, 2**31 - 1], PARAMS)),
    ("tokenizer", Tokenize(6, FULL, "a", stop=["\n", "🙂"], echo="alone", template_kwargs={"a": True, "b": None})),
    ("scheduler", Generate.of(6, [7], FULL, ["x"], "before", "given")),
    ("scheduler", StopMatched(6)),
    ("detokenizer", Begin(6, ["x"], 2, "before", b"\1\0\0\0", "given")),
    ("detokenizer", Step([1], [5], [None], [0], [1], {0: TokenLogprob(-1.5, [(5, -0.5)])}, {0: [None]})),
    ("api", Replies([Reply(1, "a", [5], None, 3, 0, logprobs=[TextLogprob(TOKEN, None, [(TOKEN, -1.0)], 4)])])),
    ("scheduler", Abort(4)),
    ("scheduler", Flush(6)),
    ("scheduler", Answered(6, "héllo", [104, 233])),
    ("scheduler", Rejected(5, "too long", "prompt")),
    ("detokenizer", Step([1, 2], [5, None], [None, "abort"], [0, 16], [3, 20])),
    ("detokenizer", Answered(6)),
    ("detokenizer", Rejected(5, "no")),
    ("detokenizer", Heartbeat(123, {"pages_free": 3})),
    ("api", Replies([Reply(1, "a", [5], "stop", 3, 0), Reply(2, "", [], None, 0, 0, "no", "prompt")])),
    ("api", Heartbeat(123, {})),
]


@pytest.mark.parametrize(("reader", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_a_message_arrives_as_it_was_sent(reader: str, message: Message) -> None:
    assert MessageDecoder(KINDS[reader]).decode(encode(message)) == message


def test_prompt_ids_survive_their_packing() -> None:
    assert Generate.of(1, [3, 0, 49151], PARAMS).prompt_ids == [3, 0, 49151]


WRONG: dict[str, bytes] = {
    "nothing": b"",
    "no MessagePack": b"\xc1",
    "a number": msgspec.msgpack.encode(7),
    "no tag": msgspec.msgpack.encode({"uid": 1}),
    "another reader's message": encode(Step([1], [1], [None], [0], [0])),
    "a wrong type": msgspec.msgpack.encode({"type": "Abort", "uid": "1"}),
    "half a message": encode(Generate.of(1, [1, 2], PARAMS))[:-3],
    "bytes that are not int32": msgspec.msgpack.encode({"type": "Generate", "uid": 1, "prompt": b"abc", "params": {}}),
    "parameters out of range": msgspec.msgpack.encode(
        {"type": "Generate", "uid": 1, "prompt": b"", "params": {"temperature": -1.0}}
    ),
    "a length of 4 billion": b"\xdd\xff\xff\xff\xff",
    "lists within lists": b"\x91" * 100_000,
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_hazard_19_what_is_no_message_is_dropped_and_counted(data: bytes) -> None:
    decoder = MessageDecoder(TO_SCHEDULER)
    with pytest.raises(MalformedMessage):
        decoder.decode(data)
    assert decoder.decode_all([data, encode(Abort(1)), data]) == [Abort(1)]
    assert decoder.malformed == 2


def test_lists_of_a_step_must_be_equally_long() -> None:
    wrong = {"uids": [1], "token_ids": [], "finish_reasons": [], "cached_tokens": [], "prompt_tokens": []}
    with pytest.raises(MalformedMessage, match="differ in length"):
        MessageDecoder(TO_DETOKENIZER).decode(msgspec.msgpack.encode({"type": "Step", **wrong}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(reader=st.sampled_from(sorted(KINDS)), data=st.binary(max_size=60))
@settings(max_examples=300)
def test_random_bytes_raise_nothing_but_malformed(reader: str, data: bytes) -> None:
    decode_or_refuse(reader, data)


@given(data=st.data(), which=st.sampled_from(MESSAGES))
@settings(max_examples=300)
def test_messages_gone_wrong_raise_nothing_but_malformed(data: st.DataObject, which: tuple[str, Message]) -> None:
    """A field of a good message becomes something else, or a byte of it does."""
    reader, message = which
    fields = msgspec.msgpack.decode(encode(message))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    decode_or_refuse(reader, msgspec.msgpack.encode(fields))
    flipped = bytearray(encode(message))
    flipped[data.draw(st.integers(0, len(flipped) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(reader, bytes(flipped))


def decode_or_refuse(reader: str, data: bytes) -> None:
    """Any other exception fails the test."""
    try:
        message = MessageDecoder(KINDS[reader]).decode(data)
    except MalformedMessage:
        return
    assert isinstance(message, Message)
