"""What each optimisation buys: the offline workload with all of them, then with one after another changed.

python -m minisgl.benchmark ablation --model qwen3-0.6b [--only overlap,graphs] [--save]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from minisgl.benchmark import offline
from minisgl.benchmark.kernel_cases import BACKENDS
from minisgl.benchmark.records import save, table
from minisgl.benchmark.target import Target, target

SWITCHES: dict[str, list[dict[str, Any]]] = {
    "overlap": [{"disable_overlap": True}],
    "graphs": [{"cuda_graph_max_bs": 0}],
    "radix": [{"cache": "naive"}],
    "fusion": [{"disable_fusion": True}],
    "page-size": [{"page_size": size} for size in (1, 16, 64)],
    "backend": [{"attn": name} for name in BACKENDS],
}
"""For each optimisation the settings to try in its place."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(SWITCHES)}; default: all")
    offline.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    subject = target(args)
    load = offline.workload(args, subject)
    results: list[tuple[str, dict[str, float]]] = []
    saved: list[dict[str, Any]] = []
    for name, variant in variants(subject, args.only):
        print(f"\n{name}", file=sys.stderr)
        try:
            found = offline.measure(variant, load, args.temperature)
        except (ValueError, RuntimeError) as error:  # a backend that is not for this machine
            if variant is subject:
                raise
            print(f"{name} cannot run here: {error}", file=sys.stderr)
            continue
        results.append((name, found))
        saved += offline.records("ablation", variant, args, found, variant=name.replace(" ", "_"))
    print(table(rows(results)))
    save(args, saved)
    return 0


def variants(subject: Target, only: str | None) -> list[tuple[str, Target]]:
    """The settings as they were given come first, and again last: what lies between these two is noise."""
    names = only.split(",") if only else list(SWITCHES)
    unknown = [name for name in names if name not in SWITCHES]
    if unknown:
        raise ValueError(f"--only {','.join(unknown)}: known are {', '.join(SWITCHES)}")
    found = [("as given", subject)]
    for name in names:
        for options in SWITCHES[name]:
            (key, value), *_ = options.items()
            if getattr(subject.config, key) != value:
                found.append((f"{key.replace('_', ' ')} {value}", subject.but(**options)))
    return [*found, ("as given, again", subject)]


def rows(results: list[tuple[str, dict[str, float]]]) -> list[list[str]]:
    listed = [["", "tokens/s", "of the first", "prefill tokens/s", "decode tokens/s"]]
    for name, found in results:
        share = found["output_throughput"] / results[0][1]["output_throughput"]
        speeds = [found.get(f"{phase}_throughput", 0.0) for phase in ("output", "prefill", "decode")]
        output, prefill, decode = (f"{speed:,.0f}" for speed in speeds)
        listed.append([name, output, f"{share:.1%}", prefill, decode])
    return listed
