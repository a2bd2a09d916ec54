"""How far simulated runs are from real ones: the same arrivals, served by this machine's CPU. Fits nothing.

python -m minisgl.benchmark simulation-error --device cpu:FIT.json --requests 40 --rate 1.5 --prompt-len 128 --save
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from minisgl.benchmark import simulate
from minisgl.benchmark.arrivals import WORKLOADS, Arrival, Load, uniform
from minisgl.benchmark.records import add_output_arguments, commit, machine, save, table, versions
from minisgl.benchmark.simulation import Result, lengths, longest, serve
from minisgl.benchmark.simulation import simulate as run
from minisgl.core.batch import Batch, ForwardOutput
from minisgl.core.trace import Tracer
from minisgl.kernel.device import DoneEvent
from minisgl.models.config import ModelConfig
from minisgl.models.resolve import resolve_model
from minisgl.sampling.args import BatchSamplingArgs
from minisgl.stage3.engine import Engine
from minisgl.stage5.cost_model import Device
from minisgl.stage5.simulated_engine import Launch, SimulatedEngine, Step
from minisgl.stage7.config import OverlapConfig

COMPARED = [(name, quantile) for name in ("TTFT", "ITL", "E2E") for quantile in ("p50", "p90", "max")]
WARM_UP = Load(requests=8, rate=None, prompt_len=256, output_len=4)  # first steps fill caches, and are slower


class WallClock:
    """A `VirtualClock` that nobody needs to move."""

    def __init__(self) -> None:
        self._start = time.monotonic_ns()

    @property
    def now(self) -> int:
        return time.monotonic_ns() - self._start

    def wait_until(self, time_ns: int) -> None:
        time.sleep(max(0, time_ns - self.now) / 1e9)


class ReplayEngine(Engine):
    """A real engine that takes its time, and then gives the tokens of the simulated one: so answers end where they were
    to end, and the next turn of a chat finds them in the cache."""

    def begin(self, ends: np.ndarray) -> None:
        """ends: as in `Launch.answers`."""
        self.ends, self.clock, self.steps = ends, WallClock(), list[Step]()

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.launch = Launch.of(batch)
        return super().prepare(batch)

    def forward_batch(self, batch: Batch, args: BatchSamplingArgs) -> ForwardOutput:
        start = self.clock.now
        super().forward_batch(batch, args).copy_done.synchronize()
        self.steps.append(Step(start, self.clock.now, self.launch.shape, self.launch.extended))
        tokens = self.launch.answers(self.ends, self.model_config.vocab_size - 1)
        return ForwardOutput(tokens, tokens, DoneEvent())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    simulate.add_load_arguments(parser)
    parser.set_defaults(model_config="smollm2-135m", requests=40, rate=1.5, prompt_len=128, output_len=32)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads: as many as were fitted")
    parser.add_argument("--only", choices=WORKLOADS, help="one of the workloads")
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> None:
    device, folder = simulate.find_device(args.device), resolve_model(args.model_config)
    if device.type != "cpu":
        raise ValueError(f"--device must be cpu:FIT.json, this machine's own fit, not {args.device!r:.80}")
    model = ModelConfig.from_folder(folder)
    asked = {name: work(args, name) for name in WORKLOADS if args.only in (None, name)}
    config = simulate.engine_config(args, device)
    limit = max(longest(arrivals, config, model) for arrivals in asked.values())
    config = replace(config, max_seq_len=limit, disable_overlap=True, dtype=device.dtype, threads=args.threads)
    engine = real_engine(config, folder, model)
    if config.num_pages is None:  # the same pool for both: what is free differs from minute to minute
        config = replace(config, num_pages=engine.pool.num_pages)
    records, rows = [], [["", *(f"{name} {quantile}" for name, quantile in COMPARED), "tokens/s"]]
    for name, arrivals in asked.items():
        figures = compare(engine, arrivals, config, model, device)
        records.append(line(args, name, figures))
        rows += [[f"{name}, {which}", *cells(figures[which], which)] for which in figures]
        print(f"{name}: done", file=sys.stderr)
    print("times in ms; error: simulated to measured\n" + table(rows))
    save(args, records)


def work(args: argparse.Namespace, name: str) -> list[Arrival]:
    return simulate.workload(argparse.Namespace(**{**vars(args), "workload": name}))


def real_engine(config: OverlapConfig, folder: Path, model: ModelConfig) -> ReplayEngine:
    """Warm."""
    assert config.max_seq_len is not None
    engine = ReplayEngine(config, folder, model, config.max_seq_len)
    measured(engine, uniform(replace(WARM_UP, prompt_len=min(WARM_UP.prompt_len, config.max_seq_len // 3))), config)
    return engine


def measured(engine: ReplayEngine, arrivals: list[Arrival], config: OverlapConfig) -> Result:
    engine.begin(lengths(arrivals))
    return serve(cast(SimulatedEngine, engine), arrivals, config, Tracer(None), engine.model_config.vocab_size - 1)


def compare(
    engine: ReplayEngine, arrivals: list[Arrival], config: OverlapConfig, model: ModelConfig, device: Device
) -> dict[str, dict[str, Any]]:
    """Figures of both, in the form of `simulate`, and of each that is compared how much too high the simulated is."""
    real = simulate.summary(measured(engine, arrivals, config))
    virtual = simulate.summary(run(arrivals, config, model, device))
    error: dict[str, Any] = {"ms": {name: {} for name, _ in COMPARED}}
    for name, quantile in COMPARED:
        error["ms"][name][quantile] = virtual["ms"][name][quantile] / real["ms"][name][quantile] - 1
    error["output_tokens_s"] = virtual["output_tokens_s"] / real["output_tokens_s"] - 1
    return {"measured": real, "simulated": virtual, "error": error}


def cells(figures: dict[str, Any], which: str) -> list[str]:
    values = [figures["ms"][name][quantile] for name, quantile in COMPARED] + [figures["output_tokens_s"]]
    return [f"{value:+.1%}" if which == "error" else f"{value:,.1f}" for value in values]


def line(args: argparse.Namespace, workload: str, figures: dict[str, Any]) -> dict[str, Any]:
    """One workload."""
    found = {"bench": "simulation_error", "model": args.model_config, "device": args.device, "workload": workload}
    ours = {"machine": machine(), "versions": versions(), "date": date.today().isoformat(), "commit": commit()}
    return {**found, **figures, **ours, "command": "python -m minisgl.benchmark " + " ".join(sys.argv[1:])}
