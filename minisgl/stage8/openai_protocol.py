"""Bodies of the OpenAI API: their fields, types and limits. Knows nothing of how they are run.

Unknown fields are ignored. Those of `unsupported` are refused. Of a field that comes twice the last one counts, as in
every JSON reader that clients are likely to use.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

import msgspec

from minisgl.core.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from minisgl.stage8.errors import ApiError, bad_request
from minisgl.stage8.messages import Plain
from minisgl.stage8.unsupported import CHAT_ONLY, COMPLETION_ONLY, Neutral, refuse_unsupported

MAX_CHOICES = 128  # of one call: prompts times n
MAX_STOPS, MAX_STOP_CHARS = 16, 1000
MAX_TEMPLATE_KWARGS = 64
ROLES = ("system", "developer", "user", "assistant", "tool")

_SAMPLING = (
    *("top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
)

MAX_TOKEN_ID = 2**31 - 1  # whether the vocabulary has an id, the tokenizer's process knows
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, frozen=True):
    """What both endpoints take. null is the same as absent, as everywhere in OpenAI's API."""

    refused: ClassVar[Neutral] = {}  # fields that only other endpoints have

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
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
    refused: ClassVar[Neutral] = COMPLETION_ONLY

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Plain] | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    refused: ClassVar[Neutral] = CHAT_ONLY

    prompt: str | list[TokenId | str | list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None


def decode_body(data: bytes, kind: type[BodyT]) -> BodyT:
    """A body of this kind, its types checked. Raises ApiError 400 that names the field."""
    return checked_fields(json_object(data), kind)


def json_object(data: bytes) -> dict[str, Any]:
    """Raises ApiError 400."""
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise bad_request("the body must be a JSON object")
    return fields


def checked_fields(fields: dict[str, Any], kind: type[BodyT]) -> BodyT:
    """Raises ApiError 400 that names the field."""
    refuse_unsupported(fields, getattr(kind, "refused", {}))
    try:
        return msgspec.convert(fields, kind, str_keys=True)  # logit_bias has ids for keys
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


def token_limit(body: Body) -> tuple[int | None, str]:
    """How many tokens the answer may have, None for the default; and the name of the field that says so."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return getattr(body, name), name


def sampling_params(body: Body, max_tokens: int, limit_name: str = "max_tokens", **more: Any) -> SamplingParams:
    """With OpenAI's defaults: temperature 1. Raises ApiError 400 that names the field; limit_name: that of the limit
    in this body. more: fields of SamplingParams that endpoints have different names for."""
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if given.get("top_k") == 0:
        del given["top_k"]  # for vLLM, and for Hugging Face, 0 is the whole vocabulary
    temperature = 1.0 if body.temperature is None else body.temperature
    stop_token_ids = tuple(body.stop_token_ids or ())
    try:
        return SamplingParams(
            temperature=temperature, max_tokens=max_tokens, stop_token_ids=stop_token_ids, **given, **more
        )
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        name = limit_name if name == "max_tokens" else name
        raise bad_request(f"{name} {rest}", name) from None


def stop_strings(body: Body) -> list[str]:
    """Raises ApiError 400."""
    strings = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(strings) > MAX_STOPS:
        raise bad_request(f"stop must have at most {MAX_STOPS} strings, not {len(strings)}", "stop")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARS:
            words = f"a string of stop must have 1 to {MAX_STOP_CHARS} characters, not {len(string)}"
            raise bad_request(words, "stop")
    return strings


def chat_logprobs(body: ChatBody) -> int | None:
    """How many of the likeliest tokens to report. Raises ApiError 400."""
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise bad_request(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {top!r:.80}", "top_logprobs")
    if top and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: set that to true, or leave top_logprobs out", "top_logprobs")
    return top if body.logprobs else None


def template_kwargs(body: ChatBody) -> dict[str, Plain]:
    """Raises ApiError 400. The names that the server sets, the template's renderer refuses."""
    kwargs = body.chat_template_kwargs or {}
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        words = f"chat_template_kwargs must have at most {MAX_TEMPLATE_KWARGS} variables, not {len(kwargs)}"
        raise bad_request(words, "chat_template_kwargs")
    return kwargs


def for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The answers to one prompt must differ, seeded or not: the second has the next seed, and so on."""
    if choice == 0 or params.seed is None:
        return params
    return replace(params, seed=(params.seed + choice) % (MAX_SEED + 1))


def _raise_named(message: str) -> NoReturn:
    """msgspec's "Expected `int`, got `str` - at `$.n`", with the field in front."""
    text, _, place = message.partition(" - at ")
    path = re.sub(r"^.*\$\.?", "", place.strip("`"))  # of a key: "key` in `$.logit_bias"
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    raise bad_request(f"{path}: {text}" if path else text, path or None)
