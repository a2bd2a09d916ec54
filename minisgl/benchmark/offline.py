"""Throughput with all requests there from the start (the workload of nano-vllm's bench.py), in a steady state.

python -m minisgl.benchmark offline --model qwen3-0.6b [--tp 2] [any setting of the engine] [--save]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from minisgl.benchmark.records import add_output_arguments, save, table
from minisgl.benchmark.steps import StepClock
from minisgl.benchmark.target import Target, add_engine_arguments, opened, target
from minisgl.benchmark.workload import OfflineWorkload
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage7.llm import LLM

UNITS = {
    "output_throughput": "tokens/s",
    "prefill_throughput": "tokens/s",
    "decode_throughput": "tokens/s",
    "run": "s",
    "start": "s",
    "hit_tokens": "tokens",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    add_output_arguments(parser)
    add_engine_arguments(parser)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=(100, 1024), metavar=("LEAST", "MOST"), help="of prompts and of answers"
    )
    parser.add_argument("--temperature", type=float, default=0.6)


def main(args: argparse.Namespace) -> int:
    subject = target(args)
    found = measure(subject, workload(args, subject), args.temperature)
    print(table([["", "", "unit"], *([name, f"{value:,.2f}", UNITS[name]] for name, value in found.items())]))
    save(args, records("offline", subject, args, found))
    return 0


def workload(args: argparse.Namespace, subject: Target) -> OfflineWorkload:
    if args.requests < 1 or not 1 <= args.lengths[0] <= args.lengths[1]:
        raise ValueError(
            f"no workload of {args.requests} requests with lengths from {args.lengths[0]} to {args.lengths[1]}"
        )
    return OfflineWorkload.draw(args.requests, tuple(args.lengths), subject.model_config.vocab_size)


def records(
    bench: str, subject: Target, args: argparse.Namespace, found: dict[str, float], **setting: Any
) -> list[dict[str, Any]]:
    least, most = args.lengths
    setting |= {"requests": args.requests, "lengths": f"{least}-{most}", "temperature": args.temperature}
    return [subject.record(bench, name, UNITS[name], value, **setting) for name, value in found.items()]


def measure(subject: Target, load: OfflineWorkload, temperature: float) -> dict[str, float]:
    """The second run of two. The first has other tokens in the same shapes, so that the second finds everything warm
    and nothing in the prefix cache (`hit_tokens` says whether that is so)."""
    params = [SamplingParams(temperature, max_tokens=most, ignore_eos=True) for most in load.output_lens]
    start = time.perf_counter()
    with opened(subject) as llm:
        started = time.perf_counter() - start
        _run(llm, load.other_tokens(), params, "first run")
        hits_before = llm.stats()["hit_tokens"]
        clock = StepClock(llm)
        seconds = _run(llm, load.prompts, params, "second run")
        hits = llm.stats()["hit_tokens"] - hits_before
    tokens, requests = sum(load.output_lens), len(load.prompts)
    found = {"output_throughput": tokens / seconds}
    found["prefill_throughput"] = (sum(map(len, load.prompts)) - hits) / clock.seconds("prefill")
    if tokens > requests:  # the first token of each comes with the prefill
        found["decode_throughput"] = (tokens - requests) / clock.seconds("decode")
    return found | {"run": seconds, "start": started, "hit_tokens": hits}


def _run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], what: str) -> float:
    """Seconds, from prompts to texts."""
    start = time.perf_counter()
    completions = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    tokens = sum(len(completion.token_ids) for completion in completions)
    print(f"{what}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s", file=sys.stderr)
    return seconds
