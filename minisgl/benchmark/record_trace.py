"""Records what hosts and GPUs do in a few steps, as small traces for figures. Draws nothing.

python -m minisgl.benchmark record-trace steps launches --model qwen3-0.6b [--batch 1,64]
python -m minisgl.benchmark record-trace layers --model llama-3.1-8b --tp 2

steps: with and without overlap, with and without CUDA graphs; a device lane from CUDA events.
launches: one decode step, each launch and each kernel, from torch's profiler; with and without CUDA graphs.
layers: one decode and one prefill step on one rank and on --tp; what is computed between the ranks' meetings. By NCCL,
    and by symmetric memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from minisgl.benchmark import recorded_llm
from minisgl.benchmark.decode_step import int_list
from minisgl.benchmark.records import commit, machine, versions
from minisgl.benchmark.target import Target, add_engine_arguments, opened, target
from minisgl.benchmark.trace_cut import HOST, cut_kernels, cut_steps, fullest_prefill, last_steps, layer_spans, write
from minisgl.benchmark.workload import random_prompts
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Event, read_events
from minisgl.stage6.communicators import check_devices
from minisgl.stage7.llm import LLM

SHOWN = 8  # decode steps that are kept
FOLDER = Path("notebooks/data")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="+", choices=list(KINDS), help="see above")
    parser.add_argument("--batch", type=int_list, default=[1, 64], metavar="N,N", help="requests that decode")
    parser.add_argument("--context", type=int, default=256, help="prompt tokens of each")
    parser.add_argument("--steps", type=int, default=24, help=f"decode steps, of which {SHOWN} at most are kept")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="where the files go")
    add_engine_arguments(parser)
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def main(args: argparse.Namespace) -> None:
    subject = target(args)
    check_machine(subject)
    args.batch.sort(reverse=True)  # a large batch shrinks at its end: the last steps of a size are of its own run
    origin = provenance(subject)
    for what in args.what:
        for name, events, said in KINDS[what](subject, args):
            path = args.out / f"{name}.json"
            write(path, events, {"what": said, **origin})
            print(f"{path}: {len(events)} events, {path.stat().st_size / 1000:.0f} kB", file=sys.stderr)


Recorded = Iterator[tuple[str, list[Event], str]]  # the file's name, its events, and what they are


def steps(subject: Target, args: argparse.Namespace) -> Recorded:
    _one_rank(subject)
    for loop in ("plain", "overlap"):
        for graphs in ("eager", "graphs"):
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.json"
                options = {**graph_options(args, graphs), "disable_overlap": loop == "plain", "trace": str(trace)}
                with opened(subject.but(**options)) as llm:
                    for batch in args.batch:
                        _decode(llm, batch, args, "warm-up")
                        _decode(llm, batch, args, "recorded")
                events = read_events(trace)
            for batch in args.batch:
                shown = cut_steps(events, *last_steps(events, batch, SHOWN))
                said = f"decode steps of {batch} requests; the device's times are by CUDA events"
                yield f"stage7-steps-{batch}-{loop}-{graphs}", shown, said


def launches(subject: Target, args: argparse.Namespace) -> Recorded:
    _one_rank(subject)
    for graphs in ("eager", "graphs"):
        events = _profiled(subject.but(**graph_options(args, graphs)), args)
        for batch in args.batch:
            step, _ = last_steps(events, batch, 1)
            said = f"a decode step of {batch} requests under torch.profiler, without overlap"
            yield f"stage7-launches-{batch}-{graphs}", cut_kernels(events, step), said


def layers(subject: Target, args: argparse.Namespace) -> Recorded:
    """With CUDA graphs, so that no kernel waits to be launched."""
    if subject.config.tp < 2:
        raise ValueError(f"layers needs ranks that meet, and --tp is {subject.config.tp}: give --tp 2")
    num_layers, batch = subject.model_config.num_layers, max(args.batch)
    for tp, comm in ((subject.config.tp, "nccl"), (1, "auto"), (subject.config.tp, "symm")):
        events = _profiled(subject.but(**graph_options(args, "graphs"), tp=tp, comm=comm), args)
        found = {f"decode-{batch}": last_steps(events, batch, 1)[0], "prefill": fullest_prefill(events)}
        for name, step in found.items():
            shown = cut_kernels(events, step)
            host = [event for event in shown if event.track in HOST]
            how = "one rank" if tp == 1 else f"each of {tp} ranks, --comm {comm},"
            name = f"stage6-layers-{name}-tp{tp}" + (f"-{comm}" if tp > 1 else "")
            yield name, [*host, *layer_spans(shown, num_layers)], f"a step of {how} in CUDA graphs, by torch.profiler"


KINDS: dict[str, Callable[[Target, argparse.Namespace], Recorded]] = {
    "steps": steps,
    "launches": launches,
    "layers": layers,
}


def check_machine(subject: Target) -> None:
    """Raises ValueError when it lacks what is to be recorded."""
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} " + ("sees none" if torch.version.cuda else "is a build for CPUs only")
        raise ValueError(f"record-trace needs a GPU, whose times it records, and {built}")
    check_devices(subject.config.device, subject.config.tp)


def graph_options(args: argparse.Namespace, graphs: str) -> dict[str, Any]:
    """Graphs for what runs here and no more: they are recorded at each start."""
    return {"cuda_graph_max_bs": 0 if graphs == "eager" else max(args.batch)}


def _profiled(subject: Target, args: argparse.Namespace) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with closing(recorded_llm.LLM(**{**subject.options, "disable_overlap": True, "trace": str(trace)})) as llm:
            _decode(llm, max(args.batch), args, "warm-up")
            for batch in args.batch:
                _decode(llm, batch, args, "recorded")
        return read_events(trace)


def _decode(llm: LLM, batch: int, args: argparse.Namespace, seed: str) -> None:
    prompts = random_prompts(batch, args.context, llm.model_config.vocab_size, f"{seed} {batch}")
    llm.generate(prompts, SamplingParams(0.6, max_tokens=args.steps + 1, ignore_eos=True))


def _one_rank(subject: Target) -> None:
    if subject.config.tp != 1:
        raise ValueError(f"steps and launches are recorded of one rank, and --tp is {subject.config.tp}: leave it out")


def provenance(subject: Target) -> dict[str, Any]:
    """Enough to repeat it, but for where the files went."""
    words = [word for before, word in pairwise(sys.argv) if before != "--out" and not word.startswith("--out")]
    return {
        "model": subject.name,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "machine": machine(),
        "date": date.today().isoformat(),
        "versions": {**versions(), "cuda": torch.version.cuda, "driver": driver()},
        "command": "python -m minisgl.benchmark " + " ".join(words),
        "commit": commit(),
    }


def driver() -> str:
    """NVIDIA's, or nothing where it does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.split("\n")[0].strip()
