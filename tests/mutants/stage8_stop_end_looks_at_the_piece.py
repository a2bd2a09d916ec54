"""8.3: finds the string in all of the text, and returns a part of the piece."""

from __future__ import annotations

from minisgl.stage8.stop_strings import StopStrings

kills = "tests/exercises/test_stage8.py::test_what_was_held_comes_before_another_string"
words = "what was held comes"


class MyStopStrings(StopStrings):
    def end(self, piece: str) -> str | None:
        text = self._held + piece
        found: list[tuple[int, int]] = []
        for string in self._strings:
            start = text.find(string, max(0, len(self._held) - len(string) + 1))
            if start >= 0:
                found.append((start + len(string), start))
        return piece[: min(found)[1]] if found else None

    def take(self, piece: str) -> str:
        text = self._held + piece
        size = next((size for size in range(min(len(text), self._longest - 1), 0, -1) if self._begins(text[-size:])), 0)
        self._held = text[len(text) - size :]
        return text[: len(text) - size]
