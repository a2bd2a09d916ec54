"""How long the first token takes to come, and how many prompt tokens a second are computed. Two commands.

python -m minisgl.benchmark ttft --model qwen3-0.6b --prompt-len 960 [--requests 1] [--save]
python -m minisgl.benchmark prefill --model qwen3-0.6b --prompt-len 960 [--max-prefill-length 16384] [--save]
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing

from minisgl.benchmark.records import add_output_arguments, percentiles, save, table
from minisgl.benchmark.target import add_engine_arguments, opened, target
from minisgl.benchmark.workload import random_prompts
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage7.llm import LLM


def add_ttft_arguments(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser, requests=1, repeat=20)


def add_prefill_arguments(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser, requests=136, repeat=3)  # 136 x 960 tokens fill eight batches of 16,384
    parser.set_defaults(max_prefill_length=16384)


def _add_arguments(parser: argparse.ArgumentParser, requests: int, repeat: int) -> None:
    parser.add_argument("--prompt-len", type=int, default=960, help="tokens, of each prompt")
    parser.add_argument("--requests", type=int, default=requests, help="prompts at once")
    parser.add_argument("--repeat", type=int, default=repeat)
    add_output_arguments(parser)
    add_engine_arguments(parser)


def ttft(args: argparse.Namespace) -> int:
    subject = target(args)
    times: list[float] = []
    with opened(subject) as llm:
        for repeat in range(-2, args.repeat):  # two to warm up
            found = first_tokens(llm, _prompts(llm, args, repeat))
            times += found if repeat >= 0 else []
    setting = {"prompt_len": args.prompt_len, "requests": args.requests}
    rows, saved = [["TTFT", "ms"]], []
    for name, seconds in percentiles(times).items():
        rows.append([name, f"{seconds * 1e3:.2f}"])
        saved.append(subject.record("ttft", f"ttft_{name}", "ms", seconds * 1e3, **setting))
    print(table(rows))
    save(args, saved)
    return 0


def prefill(args: argparse.Namespace) -> int:
    subject = target(args)
    best = 0.0
    with opened(subject) as llm:
        for repeat in range(-1, args.repeat):
            speed = prompt_throughput(llm, _prompts(llm, args, repeat))
            print(f"{'warm-up' if repeat < 0 else 'run'}: {speed:,.0f} prompt tokens/s", file=sys.stderr)
            best = max(best, speed if repeat >= 0 else 0.0)
    setting = {"prompt_len": args.prompt_len, "requests": args.requests}
    print(table([["", "prompt tokens/s"], [subject.name, f"{best:,.0f}"]]))
    save(args, [subject.record("prefill", "prefill_throughput", "tokens/s", best, **setting)])
    return 0


def first_tokens(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """Seconds from asking to the first token of each prompt; the rest is aborted."""
    waiting = set(range(len(prompts)))
    times = []
    start = time.perf_counter()
    with closing(llm.stream(prompts, SamplingParams(max_tokens=16, ignore_eos=True))) as chunks:
        for chunk in chunks:
            if chunk.index in waiting:
                waiting.remove(chunk.index)
                times.append(time.perf_counter() - start)
            if not waiting:
                break
    return times


def prompt_throughput(llm: LLM, prompts: list[list[int]]) -> float:
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    return sum(map(len, prompts)) / (time.perf_counter() - start)


def _prompts(llm: LLM, args: argparse.Namespace, repeat: int) -> list[list[int]]:
    """Others for each repeat: none may be found in the prefix cache."""
    if args.requests < 1 or args.prompt_len < 1 or args.repeat < 1:
        raise ValueError("--requests, --prompt-len and --repeat must be at least 1")
    return random_prompts(args.requests, args.prompt_len, llm.model_config.vocab_size, f"prefill {repeat}")
