"""The wall time of one decode step through the real scheduler, beside the least that memory allows.

python -m minisgl.benchmark decode_step --model qwen3-0.6b --batch 1,64,256 --context 1024 [--save]
"""

from __future__ import annotations

import argparse
import statistics
import sys

from minisgl.benchmark.floor import read_bandwidth, step_bytes
from minisgl.benchmark.records import add_output_arguments, save, table
from minisgl.benchmark.steps import StepClock
from minisgl.benchmark.target import add_engine_arguments, opened, target
from minisgl.benchmark.workload import random_prompts
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.threads import set_threads
from minisgl.stage7.llm import LLM

HEADER = ["batch", "step ms", "p90 ms", "tokens/s", "GB read", "floor ms", "of floor"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int_list, default=[1, 64, 256], metavar="N,N", help="requests that decode")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each, halfway through the steps")
    parser.add_argument("--steps", type=int, default=64, help="decode steps, of which the median is given")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help="of each device; default: measured")
    add_output_arguments(parser)
    add_engine_arguments(parser)


def int_list(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(args: argparse.Namespace) -> int:
    subject = target(args)
    if "schedule_policy" not in subject.options:  # prompts in turns with decode end before all of them have begun
        subject = subject.but(schedule_policy="prefill-first")
    rows = [HEADER]
    set_threads(subject.config.threads)
    bandwidth = args.bandwidth * 1e9 if args.bandwidth else read_bandwidth(subject.device)
    with opened(subject) as llm:
        for batch in args.batch:
            times = decode_times(llm, batch, args.context, args.steps, args.temperature)
            step, p90 = statistics.median(times), statistics.quantiles(times, n=10, method="inclusive")[-1]
            read = step_bytes(subject.model_config, subject.dtype, batch, args.context) / subject.config.tp
            floor = read / bandwidth
            rows.append(
                [
                    str(batch),
                    f"{step * 1e3:.3f}",
                    f"{p90 * 1e3:.3f}",
                    f"{batch / step:,.0f}",
                    f"{read / 1e9:.3f}",
                    f"{floor * 1e3:.3f}",
                    f"{floor / step:.0%}",
                ]
            )
            setting = {"batch": batch, "context": args.context, "temperature": args.temperature}
            found = (("step_p50", step), ("step_p90", p90), ("floor", floor))
            save(args, [subject.record("decode_step", name, "ms", value * 1e3, **setting) for name, value in found])
    print(table(rows))
    print(f"\nfloor: weights and K, V of a step at {bandwidth / 1e9:,.0f} GB/s a device", file=sys.stderr)
    return 0


def decode_times(llm: LLM, batch: int, context: int, steps: int, temperature: float) -> list[float]:
    """Seconds of each step in which all of the batch decode. Raises ValueError when they cannot run together."""
    if steps < 2 or context <= steps // 2:
        raise ValueError(f"--steps {steps} with --context {context}: at least 2, and less than twice the context")
    if batch < 1 or batch > llm.config.max_running_requests:
        most = llm.config.max_running_requests
        raise ValueError(f"--batch {batch} must be from 1 to {most}, which --max-running-requests raises")
    print(f"batch {batch}, context {context} ...", file=sys.stderr, flush=True)
    prompts = random_prompts(batch, context - steps // 2, llm.model_config.vocab_size, f"{batch} {context}")
    params = SamplingParams(temperature, max_tokens=steps + 1, ignore_eos=True)
    clock = StepClock(llm)
    try:
        llm.generate(prompts, params)
    finally:
        clock.stop()
    times = [step.seconds for step in clock.steps if step.phase == "decode" and step.requests == batch]
    if len(times) < 2:
        room = llm.ranks.num_pages * llm.config.page_size
        raise ValueError(
            f"--batch {batch} with --context {context} never ran whole: the pool holds {room} tokens and the policy "
            f"is {llm.config.schedule_policy}; raise --num-pages or --memory-ratio, or take prefill-first"
        )
    return times
