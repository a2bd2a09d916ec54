"""Does a model of yours compute here what it computes in transformers? Its logits, through the engine, side by side.

python -m minisgl.benchmark check-model DIR [--dtype bfloat16] [--attn fi] [any setting of the engine]

Each prompt is prefilled, then transformers' greedy answer is fed in token by token, so that prefill, decode, pages and
the kernels chosen for them are all in what is compared. Exit status: 0 the same, 1 different, 2 it cannot be loaded.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.records import table
from minisgl.benchmark.target import Target, add_engine_arguments, target
from minisgl.core.batch import Batch
from minisgl.core.llm import check_max_seq_len
from minisgl.core.prompts import check_prompt
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.tokenizer import Tokenizer
from minisgl.kernel.device import release_memory
from minisgl.stage3.page_pool import PageAllocator
from minisgl.stage7.graph_runner import GraphEngine

PROMPTS = (
    "The capital of France is",
    "Water boils at one hundred degrees, so a kettle",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Als die Nacht kam, ging das Kind durch den Wald und",
    "机器学习是一门",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89,",
)
FLOAT32_TOLERANCE = 1e-3  # of the standard deviation of the logits: other orders of summation give about 1e-5
ROUNDING_FACTOR = 2.0  # how much further from float32 than transformers in the same dtype we may be


@dataclass(frozen=True)
class Difference:
    """Of one prompt's logits from the reference's."""

    largest: float
    agreement: float  # share of positions with the same highest logit
    first_diverging: int | None  # output token at which a greedy answer would differ

    @classmethod
    def between(cls, ours: Tensor, reference: Tensor) -> Difference:
        """Both float32 [output tokens, vocab]."""
        same = ours.argmax(dim=1) == reference.argmax(dim=1)  # [output tokens]
        largest = (ours - reference).abs().max().item() if bool(ours.isfinite().all()) else float("inf")
        return cls(largest, same.float().mean().item(), None if bool(same.all()) else int((~same).int().argmax()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="Hugging Face folder, or hub id; stands for --model")
    parser.add_argument("--prompt", action="append", help="instead of ours; may be given several times")
    parser.add_argument("--max-tokens", type=int, default=16, help="output tokens compared after each prompt")
    add_engine_arguments(parser)
    parser.set_defaults(dtype="float32")


def main(args: argparse.Namespace) -> int:
    args.model = args.folder
    subject = target(args)
    texts = args.prompt or list(PROMPTS)
    prompts = _encode(subject, texts, args.max_tokens)
    sequences, reference = references(subject, prompts, args.max_tokens)
    lengths = [len(prompt) for prompt in prompts]
    spread = torch.cat(reference).std().item()
    tolerance = FLOAT32_TOLERANCE * spread
    if subject.dtype != torch.float32:
        rounded = transformers_logits(transformers_model(subject, subject.dtype), sequences, lengths)
        tolerance = ROUNDING_FACTOR * max(
            Difference.between(*pair).largest for pair in zip(rounded, reference, strict=True)
        )
    ours = engine_logits(subject, sequences, lengths)
    differences = [Difference.between(*pair) for pair in zip(ours, reference, strict=True)]
    print(table(_rows(texts, lengths, differences)))
    largest = max(difference.largest for difference in differences)
    same = largest <= tolerance
    dtype = str(subject.dtype).removeprefix("torch.")
    print(
        f"\n{'SAME' if same else 'DIFFERENT'}: {subject.name} in {dtype} is at most {largest:.2g} from transformers in "
        f"float32; allowed are {tolerance:.2g} (logits have a standard deviation of {spread:.2g})"
    )
    return 0 if same else 1


def references(subject: Target, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[Tensor]]:
    """Each prompt with its greedy answer, and the float32 logits that the answer comes from."""
    model = transformers_model(subject, torch.float32)
    sequences = []
    for number, prompt in enumerate(prompts):
        print(f"transformers, prompt {number + 1} of {len(prompts)} ...", file=sys.stderr, flush=True)
        sequences.append(prompt + greedy_answer(model, prompt, count))
    return sequences, transformers_logits(model, sequences, [len(prompt) for prompt in prompts])


@torch.inference_mode()
def greedy_answer(model: Any, prompt: list[int], count: int) -> list[int]:
    """By hand: `generate` would heed the folder's generation_config, which may ask for penalties."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits  # [1, tokens, vocab]
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.inference_mode()
def transformers_logits(model: Any, sequences: list[list[int]], lengths: list[int]) -> list[Tensor]:
    """float32 [output tokens, vocab] of each sequence, whose prompt has the length given: those after the prompt's last
    token and after each token of the answer but its last."""
    found = []
    for sequence, length in zip(sequences, lengths, strict=True):
        logits = model(torch.tensor([sequence[:-1]], device=model.device)).logits  # [1, tokens, vocab]
        found.append(logits[0, length - 1 :].float().cpu())
    return found


def transformers_model(subject: Target, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    release_memory()
    model = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=dtype, local_files_only=True)
    return model.to(subject.device).eval()  # type: ignore[arg-type]


@torch.inference_mode()
def engine_logits(subject: Target, sequences: list[list[int]], lengths: list[int]) -> list[Tensor]:
    """As transformers_logits, from one prefill and one decode step a token: what the sampler would be given."""
    release_memory()
    longest = max(map(len, sequences))
    config = subject.but(max_running_requests=1, max_seq_len=longest).config
    engine = GraphEngine(config, subject.folder, subject.model_config, check_max_seq_len(config, subject.model_config))
    found = []
    for number, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        print(f"minisgl, prompt {number + 1} of {len(sequences)} ...", file=sys.stderr, flush=True)
        pages = PageAllocator(engine.pool.num_pages)
        req = Req(number, torch.tensor(sequence[:length], dtype=torch.int32), SamplingParams(max_tokens=longest), 0)
        rows = []
        while req.cached_len < len(sequence) - 1:
            batch = Batch([req], num_decode=1 if req.cached_len else 0)
            engine.pad(batch)
            engine.table.assign([req], pages.allocate(engine.table.pages_needed(req)))
            engine.prepare(batch)
            ids = torch.tensor(sequence[req.cached_len : req.device_len], dtype=torch.int32, device=engine.device)
            batch.input_ids = torch.nn.functional.pad(ids, (0, batch.padded_size - batch.size))
            rows.append(engine.run_model(batch)[0].float().cpu())
            req.complete_one()
        found.append(torch.stack(rows))
    return found


def _encode(subject: Target, texts: list[str], max_tokens: int) -> list[list[int]]:
    if subject.config.tp > 1 or subject.config.dummy_weight:
        raise ValueError("check-model compares real weights on one device: leave out --tp and --dummy-weight")
    tokenizer, params = Tokenizer.from_folder(subject.folder), SamplingParams(max_tokens=max_tokens)
    prompts = [tokenizer.encode(text) for text in texts]
    for prompt in prompts:
        check_prompt(prompt, params, subject.model_config.vocab_size, subject.model_config.max_position)
    return prompts


def _rows(prompts: list[str], lengths: list[int], differences: list[Difference]) -> list[list[str]]:
    rows = [["prompt", "tokens", "max abs diff", "same top-1", "first diverging"]]
    for prompt, length, d in zip(prompts, lengths, differences, strict=True):
        diverging = "none" if d.first_diverging is None else str(d.first_diverging)
        rows.append([repr(prompt[:30]), str(length), f"{d.largest:.2g}", f"{d.agreement:.0%}", diverging])
    return rows
