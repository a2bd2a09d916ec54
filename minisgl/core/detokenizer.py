"""Turns tokens into text as they come, never half a character. Knows nothing of requests or of when they end.

A character can take several tokens (an emoji often takes three), and some decoders treat the first token of a text
differently, so tokens cannot be decoded one by one. Decoding everything again for each token would be quadratic.
So a window of the last tokens is decoded, and only the text beyond what was given out is new. Hugging Face's
TextStreamer and vLLM do the same with offsets (the walk-through's 4.8.3).
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core.tokenizer import Tokenizer
from minisgl.core.tokenizer_backends import REPLACEMENT
from minisgl.learn import exercise

MAX_UNFINISHED = 3  # UTF-8 characters have at most four bytes, so at most three wait for the last
KEEP_TOKENS = 16  # four characters of four byte tokens: enough to find the borders of characters again
MAX_TOKENS = 32


class IncrementalDetokenizer:
    """One per answer. All pieces together are `tokenizer.decode` of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the window
        self._sent = 0  # characters of the window's text that were given out

    def begin_after(self, token_ids: Sequence[int]) -> str:
        """The text of what stands before the answer, as `add` of each would give it, and cheaper. What is unfinished
        at its end comes with the answer. Call it first or not at all."""
        self._ids = [i for i in token_ids if i not in self._tokenizer.special_ids and i < self._tokenizer.vocab_size]
        text = self._tokenizer.decode(self._ids)
        end = self._sent = finished_len(text)
        self._shorten(text)
        return text[:end]

    @exercise("8.2")
    def add(self, token_id: int) -> str:
        """The text that this token makes certain: "" while its character is unfinished."""
        if token_id in self._tokenizer.special_ids or token_id >= self._tokenizer.vocab_size:
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        end = finished_len(text)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if len(self._ids) > MAX_TOKENS:
            self._shorten(text)
        return piece

    @exercise("8.2")
    def finish(self) -> str:
        """The rest, whatever it is: an answer can end within a character. Ends the use of this object."""
        rest = self._tokenizer.decode(self._ids)[self._sent :]
        self._ids, self._sent = [], 0
        return rest

    def _shorten(self, text: str) -> None:
        """Forget the window's first tokens. What is left may begin with other text than before (half a character, no
        space), but ends with the same: what was given out is counted from there."""
        kept = self._ids[-KEEP_TOKENS:]
        kept_text = self._tokenizer.decode(kept)
        if len(kept_text) > MAX_UNFINISHED:  # else these tokens print nothing, and the next would count as the first
            self._ids = kept
            self._sent -= len(text) - len(kept_text)


def finished_len(text: str) -> int:
    """Characters before the replacement characters at the end that a later token may still complete.

    No more than MAX_UNFINISHED of them can: those before stand for bytes that were wrong for good.
    """
    waiting = len(text) - len(text.rstrip(REPLACEMENT))
    return len(text) - min(waiting, MAX_UNFINISHED)
