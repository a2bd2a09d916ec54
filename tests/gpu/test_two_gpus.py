"""Two GPUs: every communicator adds right, in graphs and out of them; two ranks answer as one; a dead one ends all."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rank_processes import check_ranks
from server_process import ServerProcess, running
from tiny_model import make_tiny_model

from minisgl.core.errors import EngineFailure
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage6.ranks import RankGroup
from minisgl.stage7.llm import LLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(180),
]

WAYS = ["nccl", "pynccl", "symm"]
STEPS = 10_000
HEADS = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 4096}
OPTIONS: dict[str, Any] = {"num_pages": 600, "max_seq_len": 4096, "max_running_requests": 16, "cuda_graph_max_bs": 16}
PROMPTS = [[(7 * i + 11 * length) % 250 for i in range(length)] for length in (5, 70, 33, 1, 16, 700)]
PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, max_tokens=25, ignore_eos=True, top_p=0.9),
    SamplingParams(temperature=1.2, seed=5, max_tokens=33, ignore_eos=True, top_k=20, min_p=0.01),
    SamplingParams(max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.6, seed=6, max_tokens=30, ignore_eos=True, repetition_penalty=1.2),
]
ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 + 3 q heads and 2 + 1 KV heads: what does not divide."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), **HEADS)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("what", ["sums", "tokens"])
def test_no_step_is_wrong(what: str, name: str) -> None:
    check_ranks(what, name, "cuda", 2, STEPS, 150)


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with LLM(str(folder), dtype="float32", **OPTIONS) as llm:
        found = tokens(llm, PARAMS)
    torch.cuda.empty_cache()  # the ranks that follow share this GPU
    return found


@pytest.mark.parametrize("options", [{"comm": name} for name in WAYS] + [{"cuda_graph_max_bs": 0}, {"attn": "torch"}])
def test_two_ranks_answer_as_one(folder: Path, expected: list[list[int]], options: dict[str, Any]) -> None:
    with LLM(str(folder), tp=2, dtype="float32", **{**OPTIONS, **options}) as llm:
        assert tokens(llm, PARAMS) == expected
        assert tokens(llm, PARAMS) == expected


def test_ways_agree_in_bfloat16(folder: Path) -> None:
    """Two terms have one sum, whoever adds them."""
    found = []
    for name in WAYS:
        with LLM(str(folder), tp=2, dtype="bfloat16", comm=name, **OPTIONS) as llm:
            found.append(tokens(llm, PARAMS))
    assert found[1:] == found[:-1]


@pytest.mark.parametrize(("name", "victim"), [("symm", 0), ("symm", 1), ("pynccl", 1), ("nccl", 1)])
def test_a_killed_rank_ends_the_other(folder: Path, name: str, victim: int) -> None:
    """The other one's GPU waits in a sum that will never be complete."""
    with closing(LLM(str(folder), tp=2, comm=name, **OPTIONS)) as llm:
        assert isinstance(llm.ranks, RankGroup)
        processes, private = llm.ranks._processes, Path(llm.ranks._folder.name)
        chunks = llm.stream(PROMPTS[:3], ENDLESS)
        for _ in range(20):
            next(chunks)
        os.kill(processes[victim].pid, signal.SIGKILL)
        with pytest.raises(EngineFailure, match=f"rank {victim} was killed by SIGKILL"):
            list(chunks)
        assert all(process.poll() is not None for process in processes)
        assert not private.exists()


@pytest.fixture
def server(tmp_path: Path, folder: Path) -> Iterator[ServerProcess]:
    flags = ("--dtype", "bfloat16", "--num-pages", "8000", "--max-seq-len", "4096", "--cuda-graph-max-bs", "32")
    with running(tmp_path, "--model", str(folder), "--tp", "2", *flags) as server:
        yield server


def answer(server: ServerProcess, number: int, begun: threading.Semaphore) -> list[str]:
    body = {"prompt": "a" * (50 + number), "max_tokens": 3500, "temperature": 0.7, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=100) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        first = next(lines)
        begun.release()
        return [first, *lines]


def test_a_server_under_load_ends_with_one_of_its_ranks(server: ServerProcess) -> None:
    """Every stream is told why and ends; so does the server, and nothing is left of it."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(24) as clients:
        answers = [clients.submit(answer, server, number, begun) for number in range(24)]
        assert all(begun.acquire(timeout=60) for _ in range(24))
        victim = sorted(server.children)[1]  # they start in this order: scheduler 0, scheduler 1, the others
        os.kill(victim, signal.SIGKILL)
        for lines in (each.result(60) for each in answers):
            assert lines[-1] == "data: [DONE]"
            error = json.loads(lines[-2].removeprefix("data: "))["error"]
            assert "the scheduler 1" in error["message"]
    assert server.wait() == 1, server.log
    assert "was killed by SIGKILL; the server ends" in server.log
    assert server.remains() == []
