"""Answers as bytes: events of a stream, and whole bodies. Knows OpenAI's two formats, and nothing of the engine.

A streamed token costs one frame, so a frame is joined from bytes made once a stream and the escaped text.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from minisgl.core.outputs import FinishReason
from minisgl.stage8.logprobs import chat_logprobs, completion_logprobs
from minisgl.stage8.messages import Reply
from minisgl.stage8.text_logprob import TextLogprob

DONE = b"data: [DONE]\n\n"

# Within a JSON text these may stand as they are, but some clients split streams into lines at them.
_LINE_BREAKS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")

_encode = msgspec.json.encode


@dataclass
class Choice:
    """One answer as far as it has come."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TextLogprob] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, reply: Reply) -> None:
        self.pieces.append(reply.text)
        self.token_ids += reply.token_ids
        self.logprobs += reply.logprobs
        self.finish_reason = reply.finish_reason
        self.prompt_tokens, self.cached_tokens = reply.prompt_tokens, reply.cached_tokens

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class AnswerFormat(ABC):
    """The same id, time and model in every event of one answer."""

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, include_usage: bool, logprobs: bool = False) -> None:
        """include_usage: every event has a "usage", which is null until the last. logprobs: whole answers have them."""
        self._has_logprobs = logprobs
        self.facts = {"id": self.id_prefix + secrets.token_hex(16), "created": int(time.time()), "model": model}
        head = _encode({**self.facts, "object": self.chunk_object})[:-1]
        self._head = b"data: " + head + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def count(self, usage: Usage) -> None:
        """The events from now on say what was used so far."""
        self._tail = b'],"usage":' + _encode(usage.as_dict()) + b"}\n\n"

    def events(self, index: int, reply: Reply, is_first: bool) -> list[bytes]:
        """What a reply is to a stream. One without text is nothing, unless it has logprobs: those come at once."""
        events = [self.text(index, reply.text, reply.logprobs)] if reply.text or reply.logprobs else []
        if is_first:
            events.insert(0, self.role(index))
        if reply.finish_reason is not None:
            events.append(self.finish(index, reply.finish_reason))
        return events

    @abstractmethod
    def role(self, index: int) -> bytes:
        """The event that begins a choice, or nothing."""

    @abstractmethod
    def text(self, index: int, text: str, logprobs: Sequence[TextLogprob] = ()) -> bytes:
        """logprobs: of the tokens that came with this text, if they are wanted."""

    @abstractmethod
    def finish(self, index: int, reason: FinishReason) -> bytes: ...

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage.as_dict()) + b"}\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        listed = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        return _encode({**self.facts, "object": self.object, "choices": listed, "usage": usage.as_dict()})

    @abstractmethod
    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]: ...


class ChatFormat(AnswerFormat):
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def role(self, index: int) -> bytes:
        return self._event(index, b'{"role":"assistant","content":""}', b"null")

    def text(self, index: int, text: str, logprobs: Sequence[TextLogprob] = ()) -> bytes:
        found = json_line(chat_logprobs(logprobs)) if logprobs else b"null"
        return self._event(index, b'{"content":%b}' % json_line(text), b"null", found)

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self._event(index, b"{}", _encode(reason))

    def _event(self, index: int, delta: bytes, reason: bytes, logprobs: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, reason)
        return self._head + choice + self._tail

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text}
        logprobs = chat_logprobs(choice.logprobs) if self._has_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


class CompletionFormat(AnswerFormat):
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def role(self, index: int) -> bytes:
        return b""

    def text(self, index: int, text: str, logprobs: Sequence[TextLogprob] = ()) -> bytes:
        found = json_line(completion_logprobs(logprobs)) if logprobs else b"null"
        return self._event(index, json_line(text), b"null", found)

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self._event(index, b'""', _encode(reason))

    def _event(self, index: int, text: bytes, reason: bytes, logprobs: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (index, text, logprobs, reason)
        return self._head + choice + self._tail

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = completion_logprobs(choice.logprobs) if self._has_logprobs else None
        return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def json_line(value: Any) -> bytes:
    """JSON that no client splits. value: a text, or what holds texts."""
    data = _encode(value)
    if not data.isascii():
        for raw, escaped in _LINE_BREAKS:
            data = data.replace(raw, escaped)
    return data


def error_events(body: bytes) -> bytes:
    """How a stream ends that has begun and cannot go on."""
    return b"data: " + body + b"\n\n" + DONE
