"""What the processes say to each other. Knows nothing of its bytes, nor of sockets.

Everything travels one way round a ring: API -> tokenizer -> scheduler -> detokenizer -> API. A refusal travels it
too, so no message about a request can overtake another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from minisgl.core.outputs import FinishReason, TokenLogprob
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage8.text_logprob import TextLogprob

Echo = Literal["no", "before", "alone"]  # the prompt's text: before the answer's, or in its place
Plain = str | int | float | bool | None


class Message(msgspec.Struct, frozen=True, tag=True):
    """Every message is a tagged struct: the tag says which, the types are checked when it is decoded."""


class Tokenize(Message, frozen=True):
    """API -> tokenizer: a prompt as text, as ids, or as chat messages (the template is applied). Exactly one of
    the three is given."""

    uid: int
    params: SamplingParams
    text: str | None = None
    token_ids: list[int] | None = None
    chat: list[dict[str, Any]] | None = None
    fill_context: bool = False  # params.max_tokens becomes what the context leaves after the prompt
    stop: list[str] = []  # texts that end the answer, and are not part of it
    echo: Echo = "no"
    template_kwargs: dict[str, Plain] = {}  # variables of the chat template
    field: str | None = None  # what the client calls the prompt


class Generate(Message, frozen=True):
    """Tokenizer -> scheduler. prompt: little-endian int32 ids, which is five times faster than a list of them."""

    uid: int
    prompt: bytes
    params: SamplingParams
    stop: list[str] = []
    echo: Echo = "no"
    text: str | None = None  # the prompt's as it was given, if it is echoed and was no ids

    def __post_init__(self) -> None:
        if len(self.prompt) % 4:
            raise ValueError(f"a prompt of {len(self.prompt)} bytes is not one of int32 ids")

    @classmethod
    def of(cls, uid: int, prompt_ids: Sequence[int], params: SamplingParams, *more: Any) -> Generate:
        return cls(uid, struct.pack(f"<{len(prompt_ids)}i", *prompt_ids), params, *more)

    @property
    def prompt_ids(self) -> list[int]:
        return unpack_ids(self.prompt)


class Begin(Message, frozen=True):
    """Scheduler -> detokenizer, before the first step of a request whose text needs more than its tokens."""

    uid: int
    stop: list[str]
    min_tokens: int  # so many must come before a stop string may end the answer
    echo: Echo
    prompt: bytes  # its ids, if it is echoed
    text: str | None  # the prompt's as it was given, if it was no ids

    @classmethod
    def of(cls, request: Generate) -> Begin | None:
        """None: the text of this request's tokens is all that is wanted."""
        if not request.stop and request.echo == "no" and request.params.logprobs is None:
            return None
        prompt = b"" if request.echo == "no" else request.prompt
        return cls(request.uid, request.stop, request.params.min_tokens, request.echo, prompt, request.text)

    @property
    def prompt_ids(self) -> list[int]:
        return unpack_ids(self.prompt)


class StopMatched(Message, frozen=True):
    """Detokenizer -> scheduler, the one message against the ring's direction: a stop string has ended this request's
    text, and its terminal reply is out. What is still computed for it is dropped."""

    uid: int


class Abort(Message, frozen=True):
    """API -> tokenizer -> scheduler: nobody waits for this request any more."""

    uid: int


class Encode(Message, frozen=True):
    """API -> tokenizer: the ids of a text, for who asks for nothing else. special: begin with BOS if the model does."""

    uid: int
    text: str
    special: bool = True


class Decode(Message, frozen=True):
    """API -> tokenizer: the text of ids."""

    uid: int
    token_ids: list[int]


class Flush(Message, frozen=True):
    """API -> tokenizer -> scheduler, all ranks: forget every cached prefix. Refused while requests wait or run."""

    uid: int


class Answered(Message, frozen=True):
    """What an Encode, a Decode or a Flush came to. It travels on to the detokenizer, which makes a Reply of it."""

    uid: int
    text: str = ""
    token_ids: list[int] = []


class Rejected(Message, frozen=True):
    """Tokenizer -> scheduler -> detokenizer: the request never ran. Its terminal message."""

    uid: int
    message: str
    param: str | None = None
    is_bug: bool = False  # the server is at fault, and not the request
    code: str | None = None  # OpenAI's word for why, if there is one


class Step(Message, frozen=True):
    """Scheduler -> detokenizer: all tokens of one step, as parallel lists. None: ended without a token."""

    uids: list[int]
    token_ids: list[int | None]
    finish_reasons: list[FinishReason | None]
    cached_tokens: list[int]
    prompt_tokens: list[int]
    logprobs: dict[int, TokenLogprob] = {}  # by place in the lists: of those that ask for it
    prompt_logprobs: dict[int, list[TokenLogprob | None]] = {}

    def __post_init__(self) -> None:
        lists = (self.uids, self.token_ids, self.finish_reasons, self.cached_tokens, self.prompt_tokens)
        if len({len(values) for values in lists}) > 1:
            raise ValueError("the lists of a step differ in length")


class Heartbeat(Message, frozen=True):
    """Scheduler -> detokenizer -> API: the loop is alive. time: CLOCK_MONOTONIC ns. queue_seconds: how long those had
    waited that were first scheduled since the last one."""

    time: int
    stats: dict[str, int]
    queue_seconds: list[float] = []


class Reply(msgspec.Struct, frozen=True):
    """One request's part of `Replies`. A finish_reason or an error makes it the request's terminal one."""

    uid: int
    text: str  # may be empty: a character can take several tokens, and an end-of-sequence token has none
    token_ids: list[int]  # the tokens it stands for; an end-of-sequence token is among them
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    error: str | None = None
    param: str | None = None
    is_bug: bool = False  # the server is at fault, and not the request
    code: str | None = None  # OpenAI's word for why, if there is one
    logprobs: list[TextLogprob] = []  # one a token, or those of an echoed prompt, if the request asks for them

    @property
    def is_terminal(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Replies(Message, frozen=True):
    """Detokenizer -> API: all that one step gave, in one message."""

    replies: list[Reply]


TO_TOKENIZER = Tokenize | Encode | Decode | Flush | Abort
TO_SCHEDULER = Generate | Flush | Answered | Abort | Rejected | StopMatched
TO_DETOKENIZER = Begin | Step | Answered | Rejected | Heartbeat
TO_API = Replies | Heartbeat


def unpack_ids(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def uids_of(message: Message) -> list[int]:
    """The requests that a message is about."""
    if isinstance(message, Step):
        return message.uids
    if isinstance(message, Replies):
        return [reply.uid for reply in message.replies]
    return [] if isinstance(message, Heartbeat) else [message.uid]  # type: ignore[attr-defined]
