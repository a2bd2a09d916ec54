"""6.2: every part begins at the parameter's start."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl.models.weights import SHARDING, Piece, ReadingPlan

kills = "tests/exercises/test_stage6.py::test_q_k_and_v_lie_one_after_another"
words = "one after another"


class MyReadingPlan(ReadingPlan):
    def parts(
        self, parameter: str, prefix: str, module: str, kind: str, expert: int | None = None
    ) -> Iterator[tuple[str, Piece]]:
        dim, parts = SHARDING[module]
        for part, units in parts:
            source, total = self.cut(units, expert is not None)
            yield f"{prefix}{part}.{kind}", Piece(parameter, expert, dim, source, total, 0)
