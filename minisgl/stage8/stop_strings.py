"""Finds the end of a text that comes in pieces: the first of some strings. Knows nothing of tokens.

What comes out does not depend on where the pieces are cut: it is as if the text came one character at a time, and
ended with the first character that completes a string; of strings completed together the longest is cut off. (vLLM
and SGLang take the first of the list instead, which depends on the cuts.)
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.learn import exercise


class StopStrings:
    """One per answer. `end` and then `take` for each piece, `rest` when there is no more."""

    def __init__(self, strings: Sequence[str]) -> None:
        """strings: none is empty."""
        self._strings = strings
        self._longest = max(map(len, strings))
        self._held = ""  # may be the beginning of one of them

    @exercise("8.3")
    def end(self, piece: str) -> str | None:
        """What is left to give out before the string that this piece completes. None, and no change, if it does not."""
        text = self._held + piece
        found: list[tuple[int, int]] = []  # end, start
        for string in self._strings:
            start = text.find(string, max(0, len(self._held) - len(string) + 1))  # one within `_held` did not count
            if start >= 0:
                found.append((start + len(string), start))
        return text[: min(found)[1]] if found else None

    @exercise("8.3")
    def take(self, piece: str) -> str:
        """What may be given out now: all but the longest end that begins one of the strings."""
        text = self._held + piece
        size = next((size for size in range(min(len(text), self._longest - 1), 0, -1) if self._begins(text[-size:])), 0)
        self._held = text[len(text) - size :]
        return text[: len(text) - size]

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held

    def _begins(self, text: str) -> bool:
        return any(len(string) > len(text) and string.startswith(text) for string in self._strings)
