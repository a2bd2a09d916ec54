"""`python -m minisgl.benchmark WHAT`: chooses a measurement. Measures nothing itself."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from minisgl.core.interrupt import leave_on_interrupt

if __name__ == "__main__":
    leave_on_interrupt()  # before the imports, which take seconds

from minisgl.benchmark import (
    ablation,
    all_reduce,
    check_model,
    decode_step,
    evidence,
    fit_device,
    instant,
    kernels,
    messaging,
    offline,
    prefill,
    record_trace,
    scaling,
    serving,
    simulate,
    simulation_error,
    stages,
    tune_linear,
    tune_moe,
)
from minisgl.core.cli import fail
from minisgl.core.terminal import show_any_text

Run = Callable[[argparse.Namespace], int | None]
COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Run]] = {
    "offline": ("throughput of many requests that are there from the start", offline.add_arguments, offline.main),
    "decode_step": ("one decode step, beside its floor", decode_step.add_arguments, decode_step.main),
    "ttft": ("time to the first token", prefill.add_ttft_arguments, prefill.ttft),
    "prefill": ("prompt tokens a second", prefill.add_prefill_arguments, prefill.prefill),
    "serving": ("streaming chat over HTTP, ours or another server", serving.add_arguments, serving.main),
    "instant": ("the server without a model: requests and tokens a second", instant.add_arguments, instant.main),
    "messaging": ("CPU time of a token between engine and client", messaging.add_arguments, messaging.main),
    "kernels": ("the parts of a step, each beside plain torch", kernels.add_arguments, kernels.main),
    "all_reduce": ("every way to add up what ranks have", all_reduce.add_arguments, all_reduce.main),
    "scaling": ("what was recorded with more and more ranks", scaling.add_arguments, scaling.main),
    "tune-linear": ("which kernels suit large products on this GPU", tune_linear.add_arguments, tune_linear.main),
    "tune-moe": ("how experts are best cut into tiles on this GPU", tune_moe.add_arguments, tune_moe.main),
    "ablation": ("offline, with one optimisation after another off", ablation.add_arguments, ablation.main),
    "record-trace": (
        "what host and GPU do in a few steps, for figures",
        record_trace.add_arguments,
        record_trace.main,
    ),
    "check-model": ("logits of a model of yours against transformers", check_model.add_arguments, check_model.main),
    "simulate": ("a workload on a device that is not here", simulate.add_arguments, simulate.main),
    "evidence": ("every policy and setting of the scheduler, simulated", evidence.add_arguments, evidence.main),
    "fit-device": ("this machine's constants, for simulate", fit_device.add_arguments, fit_device.main),
    "simulation-error": (
        "simulated runs beside real ones, on this machine's CPU",
        simulation_error.add_arguments,
        simulation_error.main,
    ),
    "stages": ("every stage beside transformers, on this machine", stages.add_arguments, stages.main),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    show_any_text()
    parser = argparse.ArgumentParser(prog="python -m minisgl.benchmark")
    commands = parser.add_subparsers(dest="what", required=True)
    for name, (help_text, add_arguments, run) in COMMANDS.items():
        command = commands.add_parser(
            name, help=help_text, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        add_arguments(command)
        command.set_defaults(run=run)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return args.run(args) or 0
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    sys.exit(main())
