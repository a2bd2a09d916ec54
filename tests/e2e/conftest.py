"""What transformers says to the committed prompts, computed once a session."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from prompts import LENGTHS, ORBIT, TEXTS
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
