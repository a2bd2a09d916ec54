"""7.5: gives the buffers other tensors, which no graph reads."""

from __future__ import annotations

from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.stage7.graph_runner import GraphRunner

kills = "tests/exercises/test_stage7.py::test_a_graph_reads_its_own_buffers"
words = "that it was recorded with"


class MyGraphRunner(GraphRunner):
    def replay(self, batch: Batch) -> Tensor:
        size = batch.padded_size
        self._input_ids, self._positions, self._out_loc = batch.input_ids, batch.positions, batch.out_loc
        self._attention.prepare_for_replay(batch)
        self._replays[size]()
        return self._model.lm_head(self._hidden[: batch.size])
