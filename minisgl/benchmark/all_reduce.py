"""Every way that ranks can add up their shares, side by side: µs by size, in a CUDA graph and out of one.

python -m minisgl.benchmark all_reduce --tp 2 [--rows 1,64,256 --hidden 4096] [--save]

On a CPU there is one way, gloo. The ranks are processes of their own; the slowest one's time is given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from minisgl.benchmark.decode_step import int_list
from minisgl.benchmark.records import add_output_arguments, record, save, table
from minisgl.stage6.communicators import check_devices
from minisgl.stage6.communicators_by_name import check_communicator
from minisgl.stage6.ranks import loopback_only

SECONDS = 300  # until ranks that say nothing are ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tp", type=int, default=2, help="ranks")
    rows = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 16384]
    parser.add_argument("--rows", type=int_list, default=rows, metavar="N,N", help="of the tensor that is summed")
    parser.add_argument("--hidden", type=int, default=4096, help="its columns, bfloat16")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--windows",
        action="store_true",
        help="by --comm pynccl-window too, for which NCCL makes NVLink multicast objects unless NCCL_NVLS_ENABLE=0",
    )
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    if args.tp < 2 or min([args.hidden, *args.rows]) < 1:
        raise ValueError("--tp must be at least 2, --hidden and --rows at least 1")
    check_devices(args.device, args.tp)
    if args.windows:
        check_communicator("pynccl-window", args.device)
    times = measure(args.device, args.tp, args.rows, args.hidden, args.windows)
    forms = list(times[0]["µs"])
    lines, saved = [["rows", "KiB", "in a graph", *forms]], []
    for each in times:
        size, graph = each["rows"] * args.hidden * 2, "yes" if each["graph"] else "no"
        shown = [f"{each['µs'][form]:,.1f}" if form in each["µs"] else "" for form in forms]
        lines.append([str(each["rows"]), f"{size / 1024:,.0f}", graph, *shown])
        for form, microseconds in each["µs"].items():
            words = {"form": form.replace(" ", "-"), "rows": each["rows"], "hidden": args.hidden, "graph": graph}
            setting = " ".join(f"{name}={value}" for name, value in words.items())
            saved.append(record("all_reduce", "", setting, "time", "µs", microseconds, args.tp))
    print(table(lines))
    save(args, saved)
    return 0


def measure(device: str, size: int, rows: list[int], hidden: int, windows: bool = False) -> list[dict[str, Any]]:
    """As rank 0 says: {"rows": n, "graph": in one, "µs": {form: time}}. Raises RuntimeError when a rank fails."""
    with tempfile.TemporaryDirectory(prefix="minisgl-") as folder, contextlib.ExitStack() as processes:
        wanted = {"device": device, "size": size, "rows": rows, "hidden": hidden, "windows": windows}
        wanted["meet"] = str(Path(folder) / "meet")
        command = [sys.executable, "-m", "minisgl.benchmark.all_reduce_rank", json.dumps(wanted)]
        env, started = {**loopback_only(), **os.environ}, time.monotonic()
        ranks = [
            processes.enter_context(subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=env))
            for rank in range(size)
        ]
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
                if time.monotonic() - started > SECONDS:
                    raise RuntimeError(f"the ranks were not done in {SECONDS} s")
                time.sleep(0.05)
            if any(rank.poll() for rank in ranks):
                raise RuntimeError(f"a rank failed, exit statuses {[rank.poll() for rank in ranks]}: it has said why")
            return json.loads(ranks[0].communicate()[0])
        finally:
            for rank in ranks:
                rank.kill()
