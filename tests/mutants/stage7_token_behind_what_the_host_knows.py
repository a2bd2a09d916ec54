"""7.2: counts the tokens that the host knows, which are one fewer while a step is in flight."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.kernel.device import to_device
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage7.py::test_a_token_goes_behind_the_last_of_its_row"
words = "in flight, so the host knows"


class MyScheduler(Scheduler):
    def _write_tuple(self, batch: Batch) -> tuple[Tensor, Tensor]:
        goes = [
            (req.table_idx, len(req.input_ids)) if req.can_decode else (self.tables.dummy_row, 0) for req in batch.reqs
        ]
        rows, columns = to_device(torch.tensor(goes, dtype=torch.int64).T.contiguous(), self.engine.device).unbind()
        return rows, columns
