"""The fields of OpenAI's API that are known here and not supported. Knows nothing of those that are.

To ignore such a field would be a wrong answer given in silence, so it is refused, unless its value changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.stage8.errors import bad_request

Neutral = Mapping[str, tuple[Any, ...]]

# Field -> the values, besides null, that change nothing.
BODY: Neutral = {
    "audio": (),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "stop": ("", []),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
STREAM_OPTIONS: Neutral = {"continuous_usage_stats": (False,)}
MESSAGE: Neutral = {"audio": (), "function_call": (), "tool_calls": ([],)}


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """fields: a request's body, whose types need not be right. Raises ApiError 400 that names the field."""
    _refuse(fields, BODY)
    _refuse(fields.get("stream_options"), STREAM_OPTIONS, "stream_options.")
    messages = fields.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        _refuse(message, MESSAGE, f"messages[{index}].")


def _refuse(fields: Any, table: Neutral, prefix: str = "") -> None:
    if not isinstance(fields, dict):
        return  # the check of types will say so
    for name in sorted(fields.keys() & table.keys()):
        value = fields[name]
        # 0 == False: the type must be the same too
        if value is not None and not any(type(value) is type(ok) and value == ok for ok in table[name]):
            raise bad_request(f"{prefix}{name} is not supported by this server: leave it out", prefix + name)
