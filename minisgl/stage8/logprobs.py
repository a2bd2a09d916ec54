"""Logprobs as clients read them, in OpenAI's two forms. Knows nothing of where they come from.

One entry a token, so that they are as many as `usage` counts: those without text too, an end-of-sequence token, and a
token whose text is held back or was cut off as part of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.stage8.text_logprob import TextLogprob, TokenText

LOWEST = -9999.0  # JSON has no infinity


def chat_logprobs(entries: Sequence[TextLogprob]) -> dict[str, Any]:
    """Of a token that is a part of a character, `bytes` are exact, and `token` is what can be shown."""
    content = [
        _named(entry.token, entry.logprob) | {"top_logprobs": [_named(*other) for other in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TextLogprob]) -> dict[str, Any]:
    """top_logprobs has the token itself too, which may be none of the likeliest. text_offset: characters."""
    return {
        "tokens": [_key(entry.token) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _top(entry: TextLogprob) -> dict[str, float] | None:
    """Of tokens that look alike the likeliest counts."""
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for token, logprob in [*entry.top, (entry.token, entry.logprob)]:
        top.setdefault(_key(token), max(logprob, LOWEST))
    return top


def _named(token: TokenText, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(logprob), "bytes": list(token.data)}


def _key(token: TokenText) -> str:
    """OpenAI's name for a part of a character: it must differ from that of other parts."""
    if token.text.encode() == token.data:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST)
