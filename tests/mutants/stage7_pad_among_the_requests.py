"""7.4: the dummies become members of the batch."""

from __future__ import annotations

from minisgl.core.batch import Batch
from minisgl.stage7.graph_runner import GraphRunner

kills = "tests/exercises/test_stage7.py::test_dummies_are_padding_and_no_requests"
words = "no requests"


class MyGraphRunner(GraphRunner):
    def pad(self, batch: Batch) -> None:
        sizes = [size for size in self._sizes if size >= batch.size]
        if batch.phase == "decode" and sizes:
            batch.reqs += [self._dummy_req] * (sizes[-1] - batch.size)
            batch.padded_reqs = batch.reqs
