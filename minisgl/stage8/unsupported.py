"""The fields of OpenAI's API, and of vLLM's and SGLang's beside it, that are known here and not supported, or not
everywhere. Knows nothing of the others.

To ignore such a field would be a wrong answer given in silence, so it is refused, unless its value changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl.stage8.errors import bad_request

Neutral = Mapping[str, tuple[Any, ...]]

# Field -> the values, besides null, that change nothing.
BODY: Neutral = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),  # a program: only the model's own is run
    "continue_final_message": (False,),
    "documents": ([],),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prompt_logprobs": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
CHAT_ONLY: Neutral = {"chat_template_kwargs": ({},), "top_logprobs": (0,)}
COMPLETION_ONLY: Neutral = {"echo": (False,)}
MESSAGE: Neutral = {"audio": (), "function_call": (), "tool_calls": ([],)}


def refuse_unsupported(fields: Mapping[str, Any], elsewhere: Neutral) -> None:
    """fields: a request's body, whose types need not be right. elsewhere: what only other endpoints have.
    Raises ApiError 400 that names the field."""
    _refuse(fields, BODY)
    _refuse(fields, elsewhere, where="on this endpoint")
    messages = fields.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        _refuse(message, MESSAGE, f"messages[{index}].")


def _refuse(fields: Any, table: Neutral, prefix: str = "", where: str = "by this server") -> None:
    if not isinstance(fields, dict):
        return  # the check of types will say so
    for name in sorted(fields.keys() & table.keys()):
        value = fields[name]
        # 0 == False: the type must be the same too
        if value is not None and not any(type(value) is type(ok) and value == ok for ok in table[name]):
            raise bad_request(f"{prefix}{name} is not supported {where}: leave it out", prefix + name)
