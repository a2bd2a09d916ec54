"""One stage, alone in a fresh process: the numbers it is for, as JSON on standard output. Compares nothing.

python -m minisgl.benchmark.measure --stage 5 --dtype bfloat16 --threads 2
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from minisgl.benchmark.workload import Workload
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import read_events

REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    options: dict[str, Any] = {"dtype": args.dtype, "threads": args.threads, "max_seq_len": 4096}
    if args.tp > 1:
        options["tp"] = args.tp
    llm_class = importlib.import_module(f"minisgl.stage{args.stage}.llm").LLM
    start = time.perf_counter()
    with llm_class(**options) as llm:
        found = {"start_s": time.perf_counter() - start}
        if args.stage == 6:
            found |= rank_bytes(llm)
        if args.tp == 1:
            found |= measure(llm, args.stage, Workload())
    if args.stage == 7:
        found["bubbles_overlap_pct"] = bubbles(llm_class, options, Workload())
        found["bubbles_plain_pct"] = bubbles(llm_class, {**options, "disable_overlap": True}, Workload())
    print(json.dumps(found))


def measure(llm: Any, stage: int, load: Workload) -> dict[str, float]:
    """What this stage is for: one stream (all), many requests (3 on), the second turn of a conversation (3 and 4)."""
    params = SamplingParams(max_tokens=load.output_len, ignore_eos=True)
    prompts = load.prompts()
    llm.generate(prompts[:1], SamplingParams(max_tokens=4))  # warm-up
    repeats = 1 if stage == 1 else REPEATS  # stage 1 takes as long as all others together
    found = {"one_stream_tok_s": throughput(llm, prompts[:1], params, repeats)}
    if stage >= 3:
        found["batch_tok_s"] = throughput(llm, prompts, params, 2)
    if stage in (3, 4):
        found["turn_2_ttft_ms"] = statistics.median(second_turn(llm, load, i) for i in range(REPEATS)) * 1000
    return found


def throughput(llm: Any, prompts: list[list[int]], params: SamplingParams, repeats: int) -> float:
    """Output tokens over wall time, prefill included; the best of the repeats, since noise only slows."""
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        completions = llm.generate(prompts, params)
        best = max(best, sum(len(c.token_ids) for c in completions) / (time.perf_counter() - start))
    return best


def second_turn(llm: Any, load: Workload, repeat: int) -> float:
    """Seconds from asking to the first token, when all but the last message was computed a moment ago."""
    first, second = load.turns(repeat)
    llm.generate([first], SamplingParams(max_tokens=1))
    start = time.perf_counter()
    with closing(llm.stream([second], SamplingParams(max_tokens=2, ignore_eos=True))) as chunks:
        next(chunks)
        return time.perf_counter() - start


def rank_bytes(llm: Any) -> dict[str, float]:
    """What the fullest rank holds."""
    ready, size = llm.ranks.ready, llm.config.page_size
    return {
        "weight_bytes_rank": max(rank.weight_bytes for rank in ready),
        "kv_bytes_token_rank": max(rank.kv_bytes // (rank.num_pages + 1) for rank in ready) / size,
    }


def bubbles(llm_class: Any, options: dict[str, Any], load: Workload) -> float:
    """Percent of the time between the first and the last forward in which the engine computed nothing."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with llm_class(**options, trace=str(file)) as llm:
            llm.generate(load.prompts(), SamplingParams(max_tokens=32, ignore_eos=True))
        events = [event for event in read_events(file) if event.name == "forward" and event.track == "engine"]
    steps = [(event.ts, event.ts + (event.duration or 0)) for event in events[1:]]  # the first pays for warm-up
    busy = sum(end - start for start, end in steps)
    return 100 * (1 - busy / (steps[-1][1] - steps[0][0]))


if __name__ == "__main__":
    main()
