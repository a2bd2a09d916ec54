"""Stage 7's loops over an engine whose ranks are threads, from requests to all that came out of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minisgl.core.config import make_config
from minisgl.core.llm import Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.protocols import Communicator
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.models.config import ModelConfig
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.engine import RankEngine
from minisgl.stage6.inbox import LocalInbox
from minisgl.stage6.messages import AddRequests
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.llm import LLM


class ThreadRankEngine(RankEngine):
    """Takes its communicator ready-made."""

    def __init__(self, comm: Communicator, *args: Any) -> None:
        self._given = comm
        super().__init__(*args)

    def connect(self) -> Communicator:
        return self._given


def make_scheduler(folder: Path, comm: Communicator, eos_ids: frozenset[int], options: dict[str, Any]) -> Scheduler:
    config = make_config(OverlapConfig, {"dtype": "float32", "device": "cpu", "tp": comm.size, **options})
    engine = ThreadRankEngine(comm, config, folder, ModelConfig.from_folder(folder), 256, comm.rank)
    return Scheduler(config, engine, eos_ids, Tracer(None))


def serve(scheduler: Scheduler, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[TokenOutput]]:
    """The outputs of each prompt. Afterwards nothing may be held."""
    inbox = LocalInbox()
    inbox.put(AddRequests([Request(uid, *pair) for uid, pair in enumerate(zip(prompts, params, strict=True))]))
    outputs: list[list[TokenOutput]] = [[] for _ in prompts]
    for step in LLM.serve(scheduler, inbox):
        for output in step:
            outputs[output.uid].append(output)
        if inbox.idle:
            break
    scheduler.check_integrity()
    stats = scheduler.stats()
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    return outputs
