"""7.5: lengths and pages are those of the step before."""

from __future__ import annotations

from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.stage7.graph_runner import GraphRunner

kills = "tests/exercises/test_stage7.py::test_the_backend_is_told"
words = "backend"


class MyGraphRunner(GraphRunner):
    def replay(self, batch: Batch) -> Tensor:
        size = batch.padded_size
        self._input_ids[:size] = batch.input_ids
        self._positions[:size] = batch.positions
        self._out_loc[:size] = batch.out_loc
        self._replays[size]()
        return self._model.lm_head(self._hidden[: batch.size])
