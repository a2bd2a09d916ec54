"""7.4: asks for a graph of the size before padding."""

from __future__ import annotations

from minisgl.core.batch import Batch
from minisgl.stage7.graph_runner import GraphRunner

kills = "tests/exercises/test_stage7.py::test_a_graph_runs_what_has_its_size"
words = "its size"


class MyGraphRunner(GraphRunner):
    def can_run(self, batch: Batch) -> bool:
        return batch.phase == "decode" and batch.size in self._replays
