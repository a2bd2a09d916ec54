"""6.2: offsets are those of the whole merged weight, not of the rank's."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl.models.weights import SHARDING, Piece, ReadingPlan

kills = "tests/exercises/test_stage6.py::test_gate_and_up_are_cut_each"
words = "one after another at 3"


class MyReadingPlan(ReadingPlan):
    def parts(
        self, parameter: str, prefix: str, module: str, kind: str, expert: int | None = None
    ) -> Iterator[tuple[str, Piece]]:
        dim, parts = SHARDING[module]
        offset = 0
        for part, units in parts:
            source, total = self.cut(units, expert is not None)
            yield f"{prefix}{part}.{kind}", Piece(parameter, expert, dim, source, total, offset)
            offset += total
