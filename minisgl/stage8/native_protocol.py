"""SGLang's native endpoint, /generate: its body and its answers. Knows nothing of how they are run.

The sampling parameters stand in the body itself or under `sampling_params`, with SGLang's names or OpenAI's. A stream's
events have the whole text so far, as SGLang's have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from minisgl.stage8.call import Call, make_call, prompts_of
from minisgl.stage8.errors import ApiError, bad_request
from minisgl.stage8.messages import Reply
from minisgl.stage8.openai_protocol import (
    Body,
    TokenId,
    check_model,
    checked_fields,
    json_object,
    sampling_params,
    token_limit,
)
from minisgl.stage8.sse import Choice, CompletionFormat, Usage, json_line
from minisgl.stage8.unsupported import CHAT_ONLY, COMPLETION_ONLY, Neutral

MAX_NEW_TOKENS = 128  # SGLang's default
ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}

# Field -> the values, besides null, that change nothing.
UNSUPPORTED: Neutral = {
    **CHAT_ONLY,
    **COMPLETION_ONLY,
    "audio_data": (),
    "custom_logit_processor": (),
    "image_data": (),
    "input_embeds": (),
    "logprobs": (False, 0),
    "lora_path": (),
    "return_hidden_states": (False,),
    "return_logprob": (False,),
    "return_routed_experts": (False,),
    "session_params": (),
    "stop_regex": ("", []),
    "token_ids_logprob": (),
    "top_logprobs_num": (0,),
    "video_data": (),
}


class GenerateBody(Body, frozen=True, kw_only=True):
    refused: ClassVar[Neutral] = UNSUPPORTED

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None


def generate_call(data: bytes, served: tuple[str, ...], new_uid: Callable[[], int]) -> Call:
    """The body of /generate. Raises ApiError 400 or 404."""
    fields, given = _flat(json_object(data))
    try:
        body = checked_fields(fields, GenerateBody)
        check_model(body.model, served)
        limit, limit_name = token_limit(body)
        params = sampling_params(body, MAX_NEW_TOKENS if limit is None else limit, limit_name)
    except ApiError as error:
        if error.param not in given:
            raise
        name = given[error.param]
        raise bad_request(error.message.replace(error.param, name, 1), name) from None
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("exactly one of text and input_ids must be given", "text")
    name = "input_ids" if body.text is None else "text"
    prompt: Any = getattr(body, name)
    is_one = (isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))) and body.n in (None, 1)
    return make_call(
        body, prompts_of(prompt, name), params, lambda model, *_: NativeFormat(model, is_one), served, new_uid
    )


def _flat(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """All fields at one level, with our names; and for those that came under another name, that name."""
    nested = fields.pop("sampling_params", None)
    if nested is not None and not isinstance(nested, dict):
        raise bad_request("sampling_params must be one object, for all prompts", "sampling_params")
    flat, given = {**fields, **(nested or {})}, {}
    for alias, name in ALIASES.items():
        value = flat.pop(alias, None)
        if value is not None:
            flat[name] = value
            given[name] = alias
    return flat, given


class NativeFormat(CompletionFormat):
    """is_one: a whole answer is one object, and not a list of them."""

    id_prefix = ""

    def __init__(self, model: str, is_one: bool) -> None:
        super().__init__(model, include_usage=False)
        self._is_one = is_one
        self._so_far: defaultdict[int, Choice] = defaultdict(Choice)

    def events(self, index: int, reply: Reply, is_first: bool) -> list[bytes]:
        choice = self._so_far[index]
        choice.add(reply)
        if not reply.text and not reply.is_terminal:
            return []
        return [b"data: " + json_line({"index": index, **self._facts(choice)}) + b"\n\n"]

    def usage(self, usage: Usage) -> bytes:
        return b""  # every event has it

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        listed = [self._facts(choice) for choice in choices]
        return msgspec.json.encode(listed[0] if self._is_one else listed)

    def _facts(self, choice: Choice) -> dict[str, Any]:
        """output_ids only at the end: they too would come again with each token."""
        reason, tokens = choice.finish_reason, len(choice.token_ids)
        more = {} if reason != "length" else {"length": tokens}
        meta = {
            "id": self.facts["id"],
            "finish_reason": None if reason is None else {"type": reason, **more},
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": tokens,
            "cached_tokens": choice.cached_tokens,
        }
        return {"text": choice.text, **({} if reason is None else {"output_ids": choice.token_ids}), "meta_info": meta}
