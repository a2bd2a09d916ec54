"""7.4: pads a batch that no graph can run."""

from __future__ import annotations

from minisgl.core.batch import Batch
from minisgl.stage7.graph_runner import GraphRunner

kills = "tests/exercises/test_stage7.py::test_only_decode_is_padded"
words = "decode steps are recorded"


class MyGraphRunner(GraphRunner):
    def pad(self, batch: Batch) -> None:
        sizes = [size for size in self._sizes if size >= batch.size]
        if sizes:
            batch.padded_reqs = batch.reqs + [self._dummy_req] * (sizes[-1] - batch.size)
