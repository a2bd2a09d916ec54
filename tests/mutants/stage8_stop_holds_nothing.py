"""8.3: looks for stop strings in one piece at a time."""

from __future__ import annotations

from minisgl.stage8.stop_strings import StopStrings

kills = "tests/exercises/test_stage8.py::test_one_that_comes_in_pieces_ends_the_text"
words = "three pieces"


class MyStopStrings(StopStrings):
    def end(self, piece: str) -> str | None:
        starts = [piece.find(string) for string in self._strings if string in piece]
        return piece[: min(starts)] if starts else None

    def take(self, piece: str) -> str:
        return piece
