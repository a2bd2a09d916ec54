"""What a workload would see on a device that is not here: percentiles of a simulated run. Simulates nothing itself.

python -m minisgl.benchmark simulate --model-config llama-3.1-8b --device h200 --workload multi-turn --rate 10
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.benchmark.arrivals import WORKLOADS, Arrival, Load, asking_for
from minisgl.benchmark.models import CONFIGS
from minisgl.benchmark.records import table
from minisgl.benchmark.simulation import NEVER, Result, simulate
from minisgl.benchmark.trace_file import read_trace
from minisgl.core.config import Config, flag, make_config
from minisgl.kernel.device import prefill_length
from minisgl.models.builtin import BUILTIN
from minisgl.models.config import ModelConfig
from minisgl.models.resolve import resolve_model
from minisgl.stage5.cost_model import H200, Device
from minisgl.stage7.config import OverlapConfig

ELSEWHERE = {field.name for field in dataclasses.fields(Config)} | {"tp", "attn", "cuda_graph_max_bs"}  # not simulated
QUANTILES = (50, 90, 99, 100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        default="uniform",
        help=f"{', '.join(WORKLOADS)}, or a trace file (JSON lines of Mooncake or Qwen-Bailian)",
    )
    parser.add_argument(
        "--time-scale", type=float, default=1.0, help="of a trace file's times: 2 is half as fast, 0 at once"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write Perfetto's JSON here, in virtual time")
    parser.add_argument("--json", action="store_true", help="one object on standard output in place of tables")
    add_load_arguments(parser)


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Of every workload, and of the engine that it is served by."""
    parser.add_argument(
        "--model-config", default="qwen3-0.6b", help=f"a model folder, or {', '.join([BUILTIN, *CONFIGS])}"
    )
    parser.add_argument("--device", default="h200", help="h200, or cpu:FIT.json as fit-device wrote it")
    parser.add_argument("--requests", type=int, default=1000, metavar="N")
    parser.add_argument("--rate", type=float, metavar="R", help="requests a second on average; default: all at once")
    parser.add_argument("--prompt-len", type=int, default=512, help="mean of prompts, or of messages", metavar="N")
    parser.add_argument("--output-len", type=int, default=128, help="mean of answers", metavar="N")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="each request asks for; default: just what its answer will have"
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths and arrivals")
    parser.add_argument(
        "--max-seq-len", type=int, metavar="N", help="refuse longer requests; default: the model's limit"
    )
    group = parser.add_argument_group("scheduler")
    for field in dataclasses.fields(OverlapConfig):
        if field.name in ELSEWHERE:
            continue
        options: dict[str, Any] = {"default": field.default, "help": field.metadata["help"]}
        if isinstance(field.default, bool):
            group.add_argument(flag(field.name), action="store_true", **options)
        else:
            options |= {"choices": field.metadata["choices"], "metavar": field.metadata["metavar"]}
            group.add_argument(flag(field.name), type=int if field.default is None else type(field.default), **options)


def main(args: argparse.Namespace) -> None:
    """Standard output depends on the arguments alone; how fast the simulation was goes to standard error."""
    arrivals, model, device = workload(args), model_config(args.model_config), find_device(args.device)
    config = engine_config(args, device)
    start, cpu_start = time.perf_counter(), time.process_time()
    result = simulate(arrivals, config, model, device, args.trace)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    figures = summary(result)
    print(json.dumps(figures) if args.json else show(figures))
    speed = len(arrivals) / seconds * 60
    print(
        f"simulated in {seconds:.1f} s, {cpu_seconds:.1f} s of CPU time: {speed:,.0f} requests a minute",
        file=sys.stderr,
    )


def engine_config(args: argparse.Namespace, device: Device) -> OverlapConfig:
    """With what depends on the device in it: the scheduler sees the one that it runs on itself."""
    names = [field.name for field in dataclasses.fields(OverlapConfig) if field.name not in ELSEWHERE]
    settings = {"max_seq_len": args.max_seq_len, **{name: getattr(args, name) for name in names}}
    if args.max_prefill_length is None:
        settings["max_prefill_length"] = prefill_length(torch.device(device.type))
    return make_config(OverlapConfig, settings)


def workload(args: argparse.Namespace) -> list[Arrival]:
    arrivals = described(args)
    return arrivals if args.max_tokens is None else asking_for(args.max_tokens, arrivals)


def described(args: argparse.Namespace) -> list[Arrival]:
    if args.workload in WORKLOADS:
        return WORKLOADS[args.workload](Load(args.requests, args.rate, args.prompt_len, args.output_len, args.seed))
    if not Path(args.workload).is_file():
        raise ValueError(f"--workload must be {', '.join(WORKLOADS)} or a trace file, not {args.workload!r:.200}")
    if args.rate is not None:
        raise ValueError("--rate does not go with a trace file, which has times of its own: use --time-scale")
    return read_trace(Path(args.workload), args.requests, args.time_scale)


def model_config(name: str) -> ModelConfig:
    if name in CONFIGS:
        return ModelConfig.from_dict(CONFIGS[name])
    return ModelConfig.from_folder(resolve_model(name) if name == BUILTIN else name)


def find_device(name: str) -> Device:
    if name == "h200":
        return H200
    if name.startswith("cpu:"):
        return Device.from_file(Path(name.removeprefix("cpu:")))
    raise ValueError(f"--device must be h200 or cpu:FIT.json, not {name!r:.200}")


def summary(result: Result) -> dict[str, Any]:
    """Times in milliseconds, rates a second of virtual time."""
    served = result.last != NEVER
    arrived, first, last = result.arrived[served], result.first[served], result.last[served]
    prompts = np.array([arrival.prompt_len for arrival in result.arrivals])[served]
    outputs = np.array([arrival.output_len for arrival in result.arrivals])[served]
    seconds = float(last.max() - arrived.min()) / 1e9
    waited = queue_times(result)
    percentiles = {
        "TTFT": _percentiles(first - arrived),
        "ITL": _percentiles(result.gaps),
        "E2E": _percentiles(last - arrived),
        "queue": _percentiles(waited),
    }
    busy = sum(step.end - step.start for step in result.steps) / 1e9  # the last step may end after the last answer
    sizes = np.array([step.shape.num_requests for step in result.steps])
    figures = {
        "requests": len(result.arrivals),
        "refused": int((~served).sum()),
        "seconds": round(seconds, 6),
        "requests_s": round(len(prompts) / seconds, 3),
        "prompt_tokens_s": round(int(prompts.sum()) / seconds, 1),
        "output_tokens_s": round(int(outputs.sum()) / seconds, 1),
        "cache_hit_rate": round(int(result.cached[served].sum()) / int(prompts.sum()), 4),
        "steps": len(result.steps),
        "requests_a_step": round(float(sizes.mean()), 2),
        "device_busy": round(min(1.0, busy / seconds), 4),
        "most_queued": most_at_once(arrived, arrived + waited),
        "pages_total": result.stats["pages_total"],
        "pages_high_water": result.stats["pages_total"] - result.fewest_free,
    }
    figures |= {name: value for name, value in result.stats.items() if name.startswith("retract")}
    return {"ms": percentiles, **figures}


def queue_times(result: Result) -> np.ndarray:
    """Nanoseconds from arrival to the first step of each request that was served."""
    began: dict[int, int] = {}
    for step in result.steps:
        for uid in step.extended:
            began.setdefault(uid, step.start)
    pairs = zip(result.arrivals, result.arrived.tolist(), result.last != NEVER, strict=True)
    return np.array([began[arrival.uid] - arrived for arrival, arrived, served in pairs if served])


def most_at_once(begins: np.ndarray, ends: np.ndarray) -> int:
    """The largest number of these spans that cover one moment."""
    times = np.concatenate([begins, ends])
    change = np.repeat([1, -1], len(begins))
    return int(change[np.lexsort((change, times))].cumsum().max())


def _percentiles(nanoseconds: np.ndarray) -> dict[str, float]:
    values = np.percentile(nanoseconds / 1e6, QUANTILES) if len(nanoseconds) else [0.0] * len(QUANTILES)
    return {"max" if q == 100 else f"p{q}": round(float(value), 4) for q, value in zip(QUANTILES, values, strict=True)}


def _label(name: str) -> str:
    """prompt_tokens_s: prompt tokens/s"""
    words = name.replace("_", " ")
    return f"{words[:-2]}/s" if words.endswith(" s") else words


def show(figures: dict[str, Any]) -> str:
    ms = figures["ms"]
    header = ["ms", *next(iter(ms.values()))]
    times = table([header, *([name, *(f"{value:,.2f}" for value in row.values())] for name, row in ms.items())])
    rest = table([["", ""], *([_label(name), f"{value:,}"] for name, value in figures.items() if name != "ms")])
    return f"{times}\n{rest}"
