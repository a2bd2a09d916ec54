"""6.2: asks whether the expert's number is true, which 0 is not."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl.models.weights import SHARDING, Piece, ReadingPlan

kills = "tests/exercises/test_stage6.py::test_an_expert_is_cut_by_its_own_size"
words = "expert 0's intermediate size"


class MyReadingPlan(ReadingPlan):
    def parts(
        self, parameter: str, prefix: str, module: str, kind: str, expert: int | None = None
    ) -> Iterator[tuple[str, Piece]]:
        dim, parts = SHARDING[module]
        offset = 0
        for part, units in parts:
            source, total = self.cut(units, bool(expert))
            yield f"{prefix}{part}.{kind}", Piece(parameter, expert, dim, source, total, offset)
            offset += len(source)
