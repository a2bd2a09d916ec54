"""A token's log probability with its text, as it travels in a `Reply`. Knows nothing of how either was found."""

from __future__ import annotations

import msgspec


class TokenText(msgspec.Struct, frozen=True, array_like=True):
    """A token by itself. data: its bytes, which may be a part of a character; text: what of them can be shown."""

    token_id: int
    text: str
    data: bytes


class TextLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A TokenLogprob with the tokens' texts. logprob None: the first token of a prompt has none.
    offset: characters of the text, echo included, that were complete before this token."""

    token: TokenText
    logprob: float | None
    top: list[tuple[TokenText, float]]
    offset: int
