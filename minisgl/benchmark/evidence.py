"""Every policy, admission and setting of the scheduler over every workload, simulated: one table. Judges nothing.

python -m minisgl.benchmark evidence --model-config llama-3.1-8b --rate 30 --max-tokens 2048 --num-pages 6000 --save
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import date
from itertools import product
from typing import Any

from minisgl.benchmark import simulate
from minisgl.benchmark.arrivals import WORKLOADS
from minisgl.benchmark.records import add_output_arguments, commit, machine, save, table, versions
from minisgl.benchmark.simulation import simulate as run
from minisgl.stage7.config import OverlapConfig

CHOICES = {field.name: field.metadata.get("choices") or () for field in fields(OverlapConfig)}
SWEEPS: dict[str, tuple[Any, ...]] = {  # one setting at a time, the others as they were given
    "max_prefill_length": (128, 256, 512, 1024, 2048, 4096, 8192),
    "page_size": (1, 16, 64),
    "max_running_requests": (16, 32, 64, 128, 256),
    "cache": CHOICES["cache"],
    "disable_overlap": (False, True),
}
ROUNDS = 3  # of which the fastest counts, when a scheduler's own time is measured
COLUMNS = ["p50", "p99", "max"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    simulate.add_load_arguments(parser)
    parser.add_argument("--only", choices=[*SWEEPS, "policies", "overhead"], help="one of the tables")
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> None:
    base, records = simulate.engine_config(args, simulate.find_device(args.device)), []
    figures: dict[tuple[str, OverlapConfig], dict[str, Any]] = {}  # a setting that is the given one runs once
    for sweep, configs in tables(base).items():
        if args.only not in (None, sweep):
            continue
        rows = [["", "", *(f"{name} {column}" for name in ("TTFT", "ITL") for column in COLUMNS)]]
        rows[0] += ["tokens/s", "hits %", "retracted", "queued"]
        for workload, (setting, config) in product(WORKLOADS, configs.items()):
            key = workload, config
            if key not in figures:
                figures[key] = simulated(args, workload, config)
                records.append(line(args, workload, setting, figures[key]))
            rows.append([workload, setting, *cells(figures[key])])
        print(f"{sweep}: times in ms\n{table(rows)}\n", flush=True)
    if args.only in (None, "overhead"):
        records += overhead(args, base)
    save(args, records)


def tables(base: OverlapConfig) -> dict[str, dict[str, OverlapConfig]]:
    """Of each table the settings and what they make of the given one. A pool keeps its tokens when its pages grow."""
    pairs = product(CHOICES["schedule_policy"], CHOICES["admission"])
    found = {"policies": {f"{p}, {a}": replace(base, schedule_policy=p, admission=a) for p, a in pairs}}
    for name, values in SWEEPS.items():
        found[name] = {f"{name}={value}": replace(base, **{name: value}) for value in values}
    if base.num_pages is not None:
        tokens = base.num_pages * base.page_size
        sizes = found["page_size"].items()
        found["page_size"] = {key: replace(config, num_pages=tokens // config.page_size) for key, config in sizes}
    return found


def simulated(args: argparse.Namespace, workload: str, config: OverlapConfig) -> dict[str, Any]:
    arrivals = simulate.workload(argparse.Namespace(**{**vars(args), "workload": workload}))
    model, device = simulate.model_config(args.model_config), simulate.find_device(args.device)
    start = time.process_time()
    result = run(arrivals, config, model, device)
    return {**simulate.summary(result), "cpu_s": round(time.process_time() - start, 3)}


def cells(figures: dict[str, Any]) -> Iterator[str]:
    for name, column in product(("TTFT", "ITL"), COLUMNS):
        yield f"{figures['ms'][name][column]:,.1f}"
    yield f"{figures['output_tokens_s']:,.0f}"
    yield f"{figures['cache_hit_rate'] * 100:.0f}"
    yield f"{figures['retractions']:,}"
    yield f"{figures['most_queued']:,}"


def overhead(args: argparse.Namespace, base: OverlapConfig) -> list[dict[str, Any]]:
    """What the tree costs when nothing is ever found in it: the time of this machine, by turns, that serving took the
    scheduler (and the simulated engine, which is the same for both)."""
    best: dict[str, dict[str, Any]] = {}
    for _, cache in product(range(ROUNDS), CHOICES["cache"]):
        found = simulated(args, "uniform", replace(base, cache=cache))
        if cache not in best or found["cpu_s"] < best[cache]["cpu_s"]:
            best[cache] = found
    rows = [["no hits: CPU time of this machine", "us a request", "us a step"]]
    for cache, found in best.items():
        each = found["cpu_s"] * 1e6 / found["requests"], found["cpu_s"] * 1e6 / found["steps"]
        rows.append([cache, *(f"{value:,.0f}" for value in each)])
    print(table(rows))
    return [line(args, "uniform", f"overhead, cache={cache}", found) for cache, found in best.items()]


def line(args: argparse.Namespace, workload: str, setting: str, figures: dict[str, Any]) -> dict[str, Any]:
    """One run."""
    found = {"bench": "evidence", "model": args.model_config, "device": args.device, "workload": workload}
    ours = {"machine": machine(), "versions": versions(), "date": date.today().isoformat(), "commit": commit()}
    command = "python -m minisgl.benchmark " + " ".join(sys.argv[1:])
    return {**found, "setting": setting, **figures, **ours, "command": command}
