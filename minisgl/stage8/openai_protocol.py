"""Bodies of the OpenAI API: their fields, types and limits. Knows nothing of how they are run.

Unknown fields are ignored. Those of `unsupported` are refused.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NoReturn, TypeVar

import msgspec

from minisgl.core.sampling_params import MAX_SEED, SamplingParams
from minisgl.stage8.errors import ApiError, bad_request
from minisgl.stage8.unsupported import refuse_unsupported

MAX_CHOICES = 128  # of one call: prompts times n
ROLES = ("system", "developer", "user", "assistant", "tool")

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Body(msgspec.Struct, frozen=True):
    """What both endpoints take. null is the same as absent, as everywhere in OpenAI's API."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart]
    name: str | None = None


class ChatBody(Body, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[int]]


def decode_body(data: bytes, kind: type[BodyT]) -> BodyT:
    """A body of this kind, its types checked. Raises ApiError 400 that names the field."""
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise bad_request("the body must be a JSON object")
    refuse_unsupported(fields)
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        _raise_named(str(error))


def check_model(model: str | None, served: tuple[str, ...]) -> None:
    """Raises ApiError 404. An absent model is the one that is served."""
    if model is not None and model not in served:
        names = " or ".join(served)
        raise ApiError(404, f"there is no model {model!r:.80}: this server has {names}", "model", "model_not_found")


def check_choices(prompts: int, n: int | None) -> int:
    """How many answers each prompt gets. Raises ApiError 400."""
    if not 1 <= prompts <= MAX_CHOICES:
        raise bad_request(f"prompt must hold 1 to {MAX_CHOICES} prompts, not {prompts}", "prompt")
    each = 1 if n is None else n
    if not 1 <= each <= MAX_CHOICES // prompts:
        limit = f"{MAX_CHOICES // prompts} ({MAX_CHOICES} answers in one call)"
        raise bad_request(f"n must be an integer from 1 to {limit}, not {each!r:.80}", "n")
    return each


def sampling_params(body: Body, max_tokens: int, limit_name: str = "max_tokens") -> SamplingParams:
    """With OpenAI's defaults: temperature 1. Raises ApiError 400 that names the field; limit_name: that of the limit
    in this body."""
    given = {
        name: value
        for name in ("top_p", "top_k", "min_p", "seed", "ignore_eos")
        if (value := getattr(body, name)) is not None
    }
    temperature = 1.0 if body.temperature is None else body.temperature
    try:
        return SamplingParams(temperature=temperature, max_tokens=max_tokens, **given)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        name = limit_name if name == "max_tokens" else name
        raise bad_request(f"{name} {rest}", name) from None


def for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The answers to one prompt must differ, seeded or not: the second has the next seed, and so on."""
    if choice == 0 or params.seed is None:
        return params
    return replace(params, seed=(params.seed + choice) % (MAX_SEED + 1))


def _raise_named(message: str) -> NoReturn:
    """msgspec's "Expected `int`, got `str` - at `$.n`", with the field in front."""
    text, _, place = message.partition(" - at ")
    path = re.sub(r"^\$\.?", "", place.strip("`"))
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    raise bad_request(f"{path}: {text}" if path else text, path or None)
