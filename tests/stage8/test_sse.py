"""Events are what an OpenAI client parses, byte for byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.stage8.sse import ChatFormat, Choice, CompletionFormat, Usage, error_events, json_line


def parse(event: bytes) -> dict:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event[6:])


@given(st.text())
def test_any_text_survives_and_breaks_no_line(text: str) -> None:
    data = json_line(text)
    assert json.loads(data) == text
    assert len(data.decode().splitlines()) == 1, "httpx and others split streams as str.splitlines does"


def test_line_separators_are_escaped() -> None:
    assert json_line("a\u2028b\u2029c\x85d") == b'"a\\u2028b\\u2029c\\u0085d"'


def test_chat_events() -> None:
    form = ChatFormat("m", include_usage=False)
    events = [parse(form.role(0)), parse(form.text(0, 'é"\n')), parse(form.finish(1, "length"))]
    assert [event["choices"] for event in events] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": 'é"\n'}, "logprobs": None, "finish_reason": None}],
        [{"index": 1, "delta": {}, "logprobs": None, "finish_reason": "length"}],
    ]
    for event in events:
        assert event | form.facts == event
        assert event["object"] == "chat.completion.chunk"
        assert event["id"].startswith("chatcmpl-")
        assert set(event) == {"id", "object", "created", "model", "choices"}


def test_completion_events() -> None:
    form = CompletionFormat("m", include_usage=False)
    assert form.role(0) == b""
    assert parse(form.text(2, "a"))["choices"] == [
        {"index": 2, "text": "a", "logprobs": None, "finish_reason": None},
    ]
    assert parse(form.finish(2, "stop"))["choices"] == [
        {"index": 2, "text": "", "logprobs": None, "finish_reason": "stop"},
    ]


@pytest.mark.parametrize("format_class", [ChatFormat, CompletionFormat])
def test_usage_comes_last_and_is_null_before(format_class: type) -> None:
    form = format_class("m", include_usage=True)
    assert parse(form.text(0, "a"))["usage"] is None
    last = parse(form.usage(Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_whole_answers() -> None:
    choices = [Choice(["a"], finish_reason="stop"), Choice(["b"], finish_reason="length")]
    chat = json.loads(ChatFormat("m", False).whole(choices, Usage(1, 2, 0)))
    assert chat["object"] == "chat.completion"
    assert [c["message"] for c in chat["choices"]] == [{"role": "assistant", "content": t} for t in "ab"]
    assert [(c["index"], c["finish_reason"]) for c in chat["choices"]] == [(0, "stop"), (1, "length")]
    text = json.loads(CompletionFormat("m", False).whole(choices, Usage(1, 2, 0)))
    assert text["object"] == "text_completion"
    assert [c["text"] for c in text["choices"]] == ["a", "b"]
    assert text["usage"]["total_tokens"] == 3


def test_ids_do_not_repeat() -> None:
    assert len({ChatFormat("m", False).facts["id"] for _ in range(100)}) == 100


def test_an_error_ends_the_stream() -> None:
    assert error_events(b'{"error":{}}') == b'data: {"error":{}}\n\ndata: [DONE]\n\n'
