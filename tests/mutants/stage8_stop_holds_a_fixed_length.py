"""8.3: holds back as many characters as the longest string has, whatever they are."""

from __future__ import annotations

from minisgl.stage8.stop_strings import StopStrings

kills = "tests/exercises/test_stage8.py::test_text_that_begins_none_passes"
words = "nothing here begins"


class MyStopStrings(StopStrings):
    def end(self, piece: str) -> str | None:
        text = self._held + piece
        found: list[tuple[int, int]] = []
        for string in self._strings:
            start = text.find(string, max(0, len(self._held) - len(string) + 1))
            if start >= 0:
                found.append((start + len(string), start))
        return text[: min(found)[1]] if found else None

    def take(self, piece: str) -> str:
        text = self._held + piece
        size = min(len(text), self._longest - 1)
        self._held = text[len(text) - size :]
        return text[: len(text) - size]
