"""What is made once a session: transformers' answers to the committed prompts, and a server with a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import openai
import pytest
import torch
from prompts import LENGTHS, ORBIT, TEXTS
from server_process import SMALL, ServerProcess, running
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 8


class Expected(NamedTuple):
    prompts: list[list[int]]
    answers: list[list[int]]  # NEW_TOKENS each, greedy, float32
    gaps: list[float]  # least difference of the two best logits within each answer


@pytest.fixture(scope="session")
def expected(model_folder: Path) -> Expected:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    prompts += [tokenizer(ORBIT).input_ids[:length] for length in LENGTHS]
    longest = max(map(len, prompts))
    ids = torch.tensor([[2] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=2,
        )
    best = torch.stack(out.logits).topk(2).values  # [new, prompts, 2]
    gaps = (best[..., 0] - best[..., 1]).min(0).values.tolist()
    return Expected(prompts, out.sequences[:, longest:].tolist(), gaps)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[ServerProcess]:
    with running(tmp_path_factory.mktemp("server"), *SMALL) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
