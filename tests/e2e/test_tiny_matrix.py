"""Every page size, cache, loop, chunk and number of ranks on a tiny model: transformers' greedy tokens throughout."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import on_ranks
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from minisgl.core.config import make_config
from minisgl.core.llm import Request
from minisgl.core.protocols import Communicator, NoCommunicator
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.models.config import ModelConfig
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.engine import RankEngine
from minisgl.stage6.inbox import LocalInbox
from minisgl.stage6.messages import AddRequests
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.llm import LLM

NEW = 10
MIN_GAP = 0.01  # of the two best logits: float32 errors are a thousand times smaller
LENGTHS = (1, 3, 15, 16, 17, 31, 32, 33, 64, 65)
MATRIX = list(itertools.product([1, 16, 64], ["radix", "naive"], [True, False], [1, 2], [32, 8192]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts of all lengths, half of which begin alike, and transformers' answers. Near ties are left out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for number, length in enumerate(LENGTHS * 3):
        generator = torch.Generator().manual_seed(number if number % 2 else 0)
        ids = torch.randint(256, (length,), generator=generator)
        ids[-1] = (ids[-1] + number) % 256  # alike, and not the same
        with torch.inference_mode():
            out = model.generate(
                ids[None],
                do_sample=False,
                min_new_tokens=NEW,
                max_new_tokens=NEW,
                output_logits=True,
                return_dict_in_generate=True,
                pad_token_id=258,
            )
        best = torch.cat(out.logits).topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) >= MIN_GAP and 257 not in torch.cat(out.logits).argmax(-1):
            found.append((ids.tolist(), out.sequences[0, length:].tolist()))
    assert len(found) >= 12, "most prompts are near ties: use wider weights"
    return found


class ThreadRankEngine(RankEngine):
    def __init__(self, comm: Communicator, *args: Any) -> None:
        self._given = comm
        super().__init__(*args)

    def connect(self) -> Communicator:
        return self._given


def serve(folder: Path, comm: Communicator, prompts: list[list[int]], options: dict[str, Any]) -> list[list[int]]:
    config = make_config(OverlapConfig, {"dtype": "float32", "tp": comm.size, "max_running_requests": 6, **options})
    engine = ThreadRankEngine(comm, config, folder, ModelConfig.from_folder(folder), 256, comm.rank)
    scheduler = Scheduler(config, engine, frozenset({257}), Tracer(None))
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    inbox = LocalInbox()
    inbox.put(AddRequests([Request(uid, ids, params) for uid, ids in enumerate(prompts)]))
    tokens: list[list[int]] = [[] for _ in prompts]
    for outputs in LLM.serve(scheduler, inbox):
        for output in outputs:
            assert output.token_id is not None
            tokens[output.uid].append(output.token_id)
        if inbox.idle:
            break
    scheduler.check_integrity()
    assert scheduler.stats()["pages_free"] + scheduler.stats()["pages_cached"] == engine.pool.num_pages
    return tokens


@pytest.mark.parametrize(("page_size", "cache", "overlap", "tp", "chunk"), MATRIX)
def test_matrix(
    folder: Path, oracle: list[Any], page_size: int, cache: str, overlap: bool, tp: int, chunk: int
) -> None:
    prompts, answers = zip(*oracle, strict=True)
    options = {
        "page_size": page_size,
        "num_pages": 640 // page_size,
        "cache": cache,
        "disable_overlap": not overlap,
        "max_prefill_length": chunk,
    }
    if tp == 1:
        ranks = [serve(folder, NoCommunicator(), prompts, options)]
    else:
        ranks = on_ranks(tp, lambda comm: serve(folder, comm, prompts, options))
    for tokens in ranks:
        assert tokens == list(answers)
