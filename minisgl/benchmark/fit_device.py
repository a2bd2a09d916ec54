"""This machine as a device to simulate: a few steps of the real engine, and the constants that explain them best.

python -m minisgl.benchmark fit-device --out cpu.json [--model smollm2-135m] [--dtype bfloat16] [--threads 2]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.benchmark.records import machine, table, versions
from minisgl.core.batch import Batch
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.kernel.device import free_memory
from minisgl.models.config import ModelConfig
from minisgl.models.resolve import resolve_model
from minisgl.stage3.engine import Engine
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.cost_model import CostModel, Device, StepShape
from minisgl.stage5.scheduler import Scheduler

CASES = ((1, 32), (1, 512), (4, 128), (16, 32), (16, 128), (2, 1024), (32, 64))  # (requests, tokens of each prompt)
TOKENS = 4  # of each answer: a prefill and three decode steps
REPEATS = 3  # of which the fastest counts, since noise only slows
RATES = ("flops", "bandwidth", "attention_flops", "attention_bandwidth")  # of a Device
ROUNDS = 20  # of choosing which bound holds for each part, and fitting


class Measured(NamedTuple):
    """One step of the real engine."""

    shape: StepShape
    host: float  # seconds
    device: float


class MeasuredEngine(Engine):
    """Notes what each step is of."""

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.shape = StepShape.of(batch)
        return super().prepare(batch)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="whose steps are measured")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of weights and pool")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for simulate --device cpu:FILE")


def main(args: argparse.Namespace) -> None:
    memory, folder = free_memory(torch.device("cpu")), resolve_model(args.model)
    model = ModelConfig.from_folder(folder)
    longest, whole = max(length for _, length in CASES) + TOKENS, max(n * length for n, length in CASES)
    config = SchedulerConfig(dtype=args.dtype, device="cpu", threads=args.threads, num_pages=512, cache="naive")
    if longest > model.max_position:
        raise ValueError(f"--model {args.model} has {model.max_position} positions, and {longest} are measured")
    engine = MeasuredEngine(config, folder, model, longest)
    steps: list[Measured] = []
    for budget in (whole, None):  # a case's prompts in one step, then in chunks beside decode, as they are served
        settings = dataclasses.replace(config, max_prefill_length=budget)
        scheduler = Scheduler(settings, engine, frozenset(), Tracer(None))
        steps += fastest([measure(scheduler, engine) for _ in range(REPEATS)])
    name = f"{machine()}, {args.threads} threads"
    device = fit(steps, model, Device(name, "cpu", args.dtype, 1e11, 1e10, 1e11, 1e10, memory, 0.0, 0.0, 0.0, 0.0))
    write(args.out, device, steps, model)
    print(table(rows(steps, CostModel(model, device))))
    print(f"written to {args.out}", file=sys.stderr)


def measure(scheduler: Scheduler, engine: MeasuredEngine) -> list[Measured]:
    """Every case once, one after the other."""
    steps: list[Measured] = []
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    for requests, length in CASES:
        for uid in range(requests):
            scheduler.add(uid, [0] * length, params)
        while scheduler.has_work:
            start = time.perf_counter()
            forward_input = scheduler.schedule()
            if forward_input is None:
                raise RuntimeError("a case does not fit the pool: this is a bug")
            scheduled = time.perf_counter()
            output = scheduler.forward(forward_input)
            output.copy_done.synchronize()
            computed = time.perf_counter()
            scheduler.commit(forward_input, output)
            host = scheduled - start + time.perf_counter() - computed
            steps.append(Measured(engine.shape, host, computed - scheduled))
    return steps


def fastest(repeats: Sequence[Sequence[Measured]]) -> list[Measured]:
    """Of each step the least time of all repeats, which take the same steps."""
    return [
        Measured(same[0].shape, min(step.host for step in same), min(step.device for step in same))
        for same in zip(*repeats, strict=True)
    ]


def fit(steps: Sequence[Measured], model: ModelConfig, start: Device) -> Device:
    """The constants with the least relative error, squared and summed over all steps. Which side of its roofline a
    part is on depends on the constants: choose, solve, and choose again until nothing changes."""
    device = start
    times = np.array([step.device for step in steps])
    for _ in range(ROUNDS):
        cost = CostModel(model, device)
        columns = np.array([_bounds(cost, step.shape) for step in steps])  # [steps, 1 + rates]
        layer_s, *each = _least_squares(columns / times[:, None])
        rates: dict[str, Any] = {name: 1 / cost_s for name, cost_s in zip(RATES, each, strict=True) if cost_s}
        found = dataclasses.replace(device, layer_s=layer_s, **rates)
        if all(math.isclose(getattr(found, name), getattr(device, name)) for name in RATES):
            break
        device = found
    host = np.array([step.host for step in steps])
    columns = np.array([(1, step.shape.num_requests) for step in steps])
    host_step_s, host_request_s = _least_squares(columns / host[:, None])
    return dataclasses.replace(device, host_step_s=host_step_s, host_request_s=host_request_s)


def _bounds(cost: CostModel, shape: StepShape) -> list[float]:
    """Layers, then for each of RATES what it bounds: FLOPs of some parts and bytes of the others."""
    amounts = dict.fromkeys(RATES, 0.0)
    for part, work in cost.parts(shape).items():
        flops, bandwidth = cost.device.rates(part)
        prefix = "attention_" if part.endswith("attention") else ""
        if work.flops / flops > work.bytes / bandwidth:
            amounts[f"{prefix}flops"] += work.flops
        else:
            amounts[f"{prefix}bandwidth"] += work.bytes
    return [cost.model.num_layers, *amounts.values()]


def _least_squares(columns: np.ndarray) -> list[float]:
    """The x >= 0 with columns @ x nearest to 1: those that would be negative are 0."""
    used = columns.any(axis=0)
    scale = np.where(used, columns.max(axis=0), 1.0)
    while True:
        x = np.zeros(columns.shape[1])
        x[used] = np.linalg.lstsq(columns[:, used] / scale[used], np.ones(len(columns)), rcond=None)[0]
        if (x >= 0).all():
            return (x / scale).tolist()
        used &= x > 0


def write(path: Path, device: Device, steps: Sequence[Measured], model: ModelConfig) -> None:
    """The fit, how far it is off, and all that is needed to repeat it."""
    found = {
        "device": dataclasses.asdict(device),
        "relative_error": errors(steps, CostModel(model, device)),
        "versions": versions(),
        "command": "python -m minisgl.benchmark " + " ".join(sys.argv[1:]),
        "date": date.today().isoformat(),
        "steps": [{**step.shape._asdict(), "host_s": step.host, "device_s": step.device} for step in steps],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def errors(steps: Sequence[Measured], cost: CostModel) -> dict[str, float]:
    off = [abs(cost.device_seconds(step.shape) / step.device - 1) for step in steps]
    return {"median": float(np.median(off)), "max": max(off)}


def rows(steps: Sequence[Measured], cost: CostModel) -> list[list[str]]:
    """The first two steps of each case: prefill and decode."""
    shown = [["requests, tokens, context", "measured ms", "fitted ms", "host ms", "fitted ms"]]
    for step in steps:
        shape = step.shape
        name = f"{shape.num_requests}, {shape.num_tokens}, {shape.decode_context}"
        times = (step.device, cost.device_seconds(shape), step.host, cost.host_seconds(shape))
        shown.append([name, *(f"{seconds * 1000:.2f}" for seconds in times)])
    return shown
