"""Fields of a body that change the answer's form: what is asked of the engine, and what comes of its replies."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from fake_ring import FakeRing, reply
from test_api import CHAT, CHAT_PATH, TEXT, TEXT_PATH, events, serving

from minisgl.stage8.messages import Tokenize
from minisgl.stage8.text_logprob import TextLogprob, TokenText

A, HALF, END = TokenText(5, "a", b"a"), TokenText(6, "\ufffd", b"\xe4\xb8"), TokenText(2, "<end>", b"<end>")
OTHER_HALF = TokenText(8, "\ufffd", b"\x96")
FIRST = TextLogprob(A, -0.5, [(A, -0.5), (HALF, -1.0)], 0)
SECOND = TextLogprob(HALF, -2.0, [(A, -0.25), (OTHER_HALF, -math.inf)], 1)
LAST = TextLogprob(END, -3.0, [(END, -3.0), (A, -4.0)], 1)


def with_logprobs(request: Tokenize) -> list:
    """A token with text, one whose text is not there yet, and an end of sequence."""
    return [
        reply(request.uid, "a", logprobs=[FIRST]),
        reply(request.uid, "", logprobs=[SECOND]),
        reply(request.uid, "\ufffd", "stop", logprobs=[LAST]),
    ]


def asked(path: str, body: dict) -> Tokenize:
    async def test() -> Tokenize:
        async with serving() as server:
            assert (await server.post(path, body)).status_code == 200
            return server.ring.requests[0]

    return asyncio.run(test())


def answer(path: str, body: dict, ring: FakeRing | None = None) -> Any:
    """A whole answer's JSON, or a stream's events."""

    async def test() -> Any:
        async with serving(ring) as server:
            response = await server.post(path, body)
            assert response.status_code == 200, response.text
            return events(response) if body.get("stream") else response.json()

    return asyncio.run(test())


# What is asked of the engine


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
def test_sampling_fields_reach_the_engine(path: str, body: dict) -> None:
    fields = {
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 3,
        "max_completion_tokens": 9,
    }
    request = asked(path, body | fields | {"logit_bias": {"5": -100, "7": 2.5}, "stop_token_ids": [4, 9], "stop": "x"})
    params = request.params
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1, 0.5, 1.5)
    assert (params.min_tokens, params.max_tokens, params.stop_token_ids) == (3, 9, (4, 9))
    assert params.logit_bias == {5: -100, 7: 2.5}
    assert (params.logprobs, params.prompt_logprobs) == (None, False)
    assert (request.stop, request.echo, request.fill_context) == (["x"], "no", False)


def test_neutral_values_ask_nothing() -> None:
    neutral = {"stop": [], "stop_token_ids": [], "logit_bias": {}, "presence_penalty": 0, "repetition_penalty": 1}
    neutral |= {"top_k": 0}  # vLLM's default
    neutral |= {"include_stop_str_in_output": False, "skip_special_tokens": True, "guided_json": None, "bad_words": []}
    request = asked(CHAT_PATH, CHAT | neutral | {"logprobs": False, "top_logprobs": 0, "chat_template_kwargs": {}})
    assert request.stop == []
    assert not request.params.logit_bias
    assert request.params.logprobs is None
    assert request.params.top_k == -1


@pytest.mark.parametrize(
    ("path", "body", "logprobs", "of_prompt", "echo", "max_tokens"),
    [
        (CHAT_PATH, CHAT | {"logprobs": True, "max_tokens": 5}, 0, False, "no", 5),
        (CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 20, "max_tokens": 5}, 20, False, "no", 5),
        (TEXT_PATH, TEXT | {"logprobs": 0}, 0, False, "no", 16),
        (TEXT_PATH, TEXT | {"logprobs": 5, "echo": True}, 5, True, "before", 16),
        (TEXT_PATH, TEXT | {"echo": True}, None, False, "before", 16),
        (TEXT_PATH, TEXT | {"echo": False}, None, False, "no", 16),
        (TEXT_PATH, TEXT | {"logprobs": 1, "echo": True, "max_tokens": 0}, 1, True, "alone", 1),
    ],
)
def test_logprobs_and_echo_asked(
    path: str, body: dict, logprobs: Any, of_prompt: bool, echo: str, max_tokens: int
) -> None:
    request = asked(path, body)
    found = (request.params.logprobs, request.params.prompt_logprobs, request.echo, request.params.max_tokens)
    assert found == (logprobs, of_prompt, echo, max_tokens)


def test_template_variables_and_a_minimum_without_a_maximum() -> None:
    request = asked(
        CHAT_PATH, CHAT | {"chat_template_kwargs": {"enable_thinking": False, "a": None}, "min_tokens": 500}
    )
    assert request.template_kwargs == {"enable_thinking": False, "a": None}
    assert request.fill_context
    assert request.params.min_tokens == 500


def test_the_last_of_two_counts() -> None:
    async def test() -> None:
        async with serving() as server:
            await server.post(TEXT_PATH, b'{"prompt": "a", "min_tokens": 9, "min_tokens": 2, "prompt": "b"}')
            assert server.ring.requests[0].params.min_tokens == 2
            assert server.ring.requests[0].text == "b"

    asyncio.run(test())


# Logprobs

CONTENT = [
    {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "\ufffd", "logprob": -1.0, "bytes": [0xE4, 0xB8]},
        ],
    },
    {
        "token": "\ufffd",
        "logprob": -2.0,
        "bytes": [0xE4, 0xB8],
        "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [0x96]},
        ],
    },
    {
        "token": "<end>",
        "logprob": -3.0,
        "bytes": list(b"<end>"),
        "top_logprobs": [
            {"token": "<end>", "logprob": -3.0, "bytes": list(b"<end>")},
            {"token": "a", "logprob": -4.0, "bytes": [97]},
        ],
    },
]
ENTRIES = {
    "tokens": ["a", "bytes:\\xe4\\xb8", "<end>"],
    "token_logprobs": [-0.5, -2.0, -3.0],
    "top_logprobs": [
        {"a": -0.5, "bytes:\\xe4\\xb8": -1.0},
        {"a": -0.25, "bytes:\\x96": -9999.0, "bytes:\\xe4\\xb8": -2.0},
        {"<end>": -3.0, "a": -4.0},
    ],
    "text_offset": [0, 1, 1],
}


def test_chat_logprobs() -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    [choice] = answer(CHAT_PATH, body, FakeRing(with_logprobs))["choices"]
    assert choice["logprobs"] == {"content": CONTENT, "refusal": None}
    chunks = [event["choices"][0] for event in answer(CHAT_PATH, body | {"stream": True}, FakeRing(with_logprobs))]
    assert [chunk["delta"].get("content") for chunk in chunks] == ["", "a", "", "\ufffd", None]
    assert chunks[0]["logprobs"] is chunks[-1]["logprobs"] is None
    assert [chunk["logprobs"]["content"] for chunk in chunks[1:-1]] == [[entry] for entry in CONTENT]


def test_completion_logprobs() -> None:
    body = TEXT | {"logprobs": 2}
    [choice] = answer(TEXT_PATH, body, FakeRing(with_logprobs))["choices"]
    assert choice["logprobs"] == ENTRIES
    chunks = [event["choices"][0] for event in answer(TEXT_PATH, body | {"stream": True}, FakeRing(with_logprobs))]
    streamed: dict[str, list] = {name: [] for name in ENTRIES}
    for chunk in chunks[:-1]:
        for name, values in chunk["logprobs"].items():
            streamed[name] += values
    assert streamed == ENTRIES


def test_logprobs_of_an_answer_without_tokens_are_empty_and_not_null() -> None:
    nothing = FakeRing(lambda request: [reply(request.uid, "", "stop", tokens=0)])
    [choice] = answer(CHAT_PATH, CHAT | {"logprobs": True}, nothing)["choices"]
    assert choice["logprobs"] == {"content": [], "refusal": None}


def test_line_separators_in_logprobs_break_no_event() -> None:
    entry = TextLogprob(TokenText(1, "\u2028", "\u2028".encode()), -1.0, [], 0)
    ring = FakeRing(lambda request: [reply(request.uid, "a", "stop", logprobs=[entry])])

    async def test() -> None:
        async with serving(ring) as server:
            text = (await server.post(CHAT_PATH, CHAT | {"stream": True, "logprobs": True})).text
            assert "\u2028" not in text
            assert "\\u2028" in text

    asyncio.run(test())


# Echo


def echoing(request: Tokenize) -> list:
    prompt = [TextLogprob(A, None, [], 0), TextLogprob(A, -1.5, [(A, -1.5)], 1)]
    return [
        reply(request.uid, "aa", tokens=0, logprobs=prompt),
        reply(request.uid, "a", "length", logprobs=[TextLogprob(A, -0.5, [(A, -0.5)], 2)]),
    ]


@pytest.mark.parametrize("n", [1, 2])
def test_an_echoed_prompt_comes_first_and_is_not_counted(n: int) -> None:
    body = TEXT | {"echo": True, "logprobs": 1, "max_tokens": 1, "n": n}
    found = answer(TEXT_PATH, body, FakeRing(echoing))
    for choice in found["choices"]:
        assert choice["text"] == "aaa"
        assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -0.5]
        assert choice["logprobs"]["top_logprobs"] == [None, {"a": -1.5}, {"a": -0.5}]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (5, n)
    streamed = answer(TEXT_PATH, body | {"stream": True}, FakeRing(echoing))
    for index in range(n):
        assert "".join(c["text"] for e in streamed for c in e["choices"] if c["index"] == index) == "aaa"


def test_lm_eval_can_read_it() -> None:
    """What lm-eval's `local-completions` does with a loglikelihood answer: the prompt's last tokens are scored, the
    one that was generated is dropped, and a token is greedy if it is the likeliest of its top_logprobs."""
    body = TEXT | {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    [choice] = answer(TEXT_PATH, body, FakeRing(echoing))["choices"]
    context_len = 1
    token_logprobs = choice["logprobs"]["token_logprobs"][context_len:-1]
    top_logprobs = choice["logprobs"]["top_logprobs"][context_len:-1]
    assert sum(token_logprobs) == -1.5
    assert all(one == max(top.values()) for one, top in zip(token_logprobs, top_logprobs, strict=True))


# Usage as it grows


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
@pytest.mark.parametrize("include", [True, False])
def test_every_event_says_what_was_used_so_far(path: str, body: dict, include: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include}
    found = answer(path, body | {"stream": True, "stream_options": options, "n": 2})
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 6)
    assert {event["usage"]["prompt_tokens"] for event in found} == {5}
    assert (found[-1]["choices"] == []) == include
