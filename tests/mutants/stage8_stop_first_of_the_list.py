"""8.3: the first string of the list that is found ends the text."""

from __future__ import annotations

from minisgl.stage8.stop_strings import StopStrings

kills = "tests/exercises/test_stage8.py::test_the_first_to_be_complete_ends_the_text"
words = "'b' is complete before"


class MyStopStrings(StopStrings):
    def end(self, piece: str) -> str | None:
        text = self._held + piece
        for string in self._strings:
            start = text.find(string, max(0, len(self._held) - len(string) + 1))
            if start >= 0:
                return text[:start]
        return None

    def take(self, piece: str) -> str:
        text = self._held + piece
        size = next((size for size in range(min(len(text), self._longest - 1), 0, -1) if self._begins(text[-size:])), 0)
        self._held = text[len(text) - size :]
        return text[: len(text) - size]
