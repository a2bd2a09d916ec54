"""What clients may ask besides answers: the tokenizer's work by itself, and an empty cache. Knows no routes.

Each is one message round the ring and one reply: the API's process has neither tokenizer nor cache.
"""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl.core.garbage import unsearched
from minisgl.stage8.ask import RequestRefused
from minisgl.stage8.errors import ApiError, bad_request
from minisgl.stage8.frontend import Frontend
from minisgl.stage8.messages import Decode, Encode, Flush
from minisgl.stage8.openai_protocol import TokenId, check_model, decode_body
from minisgl.stage8.service import Service

MAX_TEXT = 1 << 20  # characters, and ids: about a second of the tokenizer's time, in which it does nothing else


class EncodeBody(msgspec.Struct, frozen=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None


class DecodeBody(msgspec.Struct, frozen=True):
    tokens: list[TokenId]
    model: str | None = None


async def tokenize(data: bytes, service: Service) -> dict[str, Any]:
    """The body of /tokenize, answered. Raises ApiError, and what `Frontend.once` raises."""
    frontend = service.accepting()
    with unsearched():
        body = decode_body(data, EncodeBody)
    check_model(body.model, service.names)
    _check_length(len(body.prompt), "prompt", "characters")
    special = body.add_special_tokens is not False
    reply = await frontend.once(Encode(frontend.new_uid(), body.prompt, special))
    return {"tokens": reply.token_ids, "count": len(reply.token_ids), "max_model_len": service.max_model_len}


async def detokenize(data: bytes, service: Service) -> dict[str, Any]:
    """The body of /detokenize, answered, under vLLM's name for the text and under SGLang's. Raises as `tokenize`."""
    frontend = service.accepting()
    with unsearched():
        body = decode_body(data, DecodeBody)
    check_model(body.model, service.names)
    _check_length(len(body.tokens), "tokens", "ids")
    reply = await frontend.once(Decode(frontend.new_uid(), body.tokens))
    return {"prompt": reply.text, "text": reply.text}


async def flush_cache(frontend: Frontend) -> dict[str, Any]:
    """Raises ApiError 409 while requests wait or run: what they hold cannot be flushed."""
    try:
        await frontend.once(Flush(frontend.new_uid()))
    except RequestRefused as refusal:
        raise ApiError(409, str(refusal), code="busy") from None
    return {"status": "flushed"}


def _check_length(length: int, name: str, what: str) -> None:
    if length > MAX_TEXT:
        raise bad_request(f"{name} has {length} {what}, over the limit of {MAX_TEXT}: send it in pieces", name)
