"""The server's scheduler process with an engine that answers at once: no model, no arithmetic, fixed words.

For `benchmark instant`, which measures all of the server but the model. The scheduler is the real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.core.batch import Batch, ForwardOutput
from minisgl.core.llm import check_max_seq_len
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.tokenizer import Tokenizer
from minisgl.models.config import ModelConfig
from minisgl.stage3.page_table import PageTable
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage5.simulated_engine import NoSampler, SimulatedPool
from minisgl.stage8 import scheduler_process
from minisgl.stage8.child import Child, run_child
from minisgl.stage8.server_config import ServerConfig

TEXT = "The quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak tree. "
PAGES = 8192
_NONE = torch.empty(0, dtype=torch.int64)


class NoEvent:
    def synchronize(self) -> None:
        """There is nothing to wait for."""


class InstantEngine:
    """Takes the place of stage 3's Engine under a Scheduler. Token n of a sequence is a word of TEXT."""

    def __init__(self, config: ServerConfig, max_seq_len: int, words: Tensor) -> None:
        """words: int32 [n]."""
        self.device, self.max_seq_len, self._words = torch.device("cpu"), max_seq_len, words
        self.pool = SimulatedPool(config.num_pages or PAGES, config.page_size)
        rows = config.max_running_requests
        self.table = PageTable(rows, max_seq_len, config.page_size, self.pool.dummy_slot, self.device)
        self.dummy_req = Req(-1, torch.zeros(1, dtype=torch.int32), SamplingParams(max_tokens=1), rows)
        self.sampler = NoSampler()

    def pad(self, batch: Batch) -> None:
        """Steps of any size are launched as they are."""

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        batch.attn_metadata = torch.tensor([req.device_len for req in batch.reqs])
        batch.positions = batch.out_loc = _NONE
        batch.logits_rows = None
        return _NONE, _NONE

    def forward_batch(self, batch: Batch, args: None) -> ForwardOutput:
        lengths: Any = batch.attn_metadata
        tokens = self._words[lengths % len(self._words)]  # [reqs]
        return ForwardOutput(tokens, tokens, NoEvent())


def make_scheduler(child: Child) -> Scheduler:
    config, folder = child.orders.config, Path(child.orders.folder)
    tokenizer = Tokenizer.from_folder(folder)
    words = torch.tensor(tokenizer.encode(TEXT)[:20], dtype=torch.int32)
    engine: Any = InstantEngine(config, check_max_seq_len(config, ModelConfig.from_folder(folder)), words)
    return Scheduler(config, engine, tokenizer.eos_ids, child.tracer)


if __name__ == "__main__":
    scheduler_process.make_scheduler = make_scheduler
    run_child(scheduler_process.work)
