"""7.2: places for the dummies of a graph too, which are not sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.core.batch import Batch
from minisgl.kernel.device import to_device
from minisgl.stage5.scheduler import Scheduler

kills = "tests/exercises/test_stage7.py::test_dummy_requests_have_no_token"
words = "has no token"


class MyScheduler(Scheduler):
    def _write_tuple(self, batch: Batch) -> tuple[Tensor, Tensor]:
        reqs = batch.padded_reqs
        goes = [(req.table_idx, req.device_len) if req.can_decode else (self.tables.dummy_row, 0) for req in reqs]
        rows, columns = to_device(torch.tensor(goes).T.contiguous(), self.engine.device).unbind()
        return rows, columns
