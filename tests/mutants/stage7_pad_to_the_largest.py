"""7.4: the first size that is large enough is the largest."""

from __future__ import annotations

from minisgl.core.batch import Batch
from minisgl.stage7.graph_runner import GraphRunner

kills = "tests/exercises/test_stage7.py::test_the_smallest_graph_that_holds_it"
words = "smallest"


class MyGraphRunner(GraphRunner):
    def pad(self, batch: Batch) -> None:
        sizes = [size for size in self._sizes if size >= batch.size]
        if batch.phase == "decode" and sizes:
            batch.padded_reqs = batch.reqs + [self._dummy_req] * (sizes[0] - batch.size)
