"""What a measurement is written down as: one JSON object a line, enough to repeat it. Measures nothing itself."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "triton", "flashinfer-python", "flash-attn-4")


def record(bench: str, model: str, setting: str, metric: str, unit: str, value: float, tp: int = 1) -> dict[str, Any]:
    """One number. setting: whatever distinguishes it from its neighbours, as `key=value` pairs."""
    return {
        "bench": bench,
        "model": model,
        "tp": tp,
        "setting": setting,
        "metric": metric,
        "unit": unit,
        "value": round(value, 4),
        "machine": machine(),
        "versions": versions(),
        "command": "python -m minisgl.benchmark " + " ".join(sys.argv[1:]),
        "date": date.today().isoformat(),
        "commit": commit(),
    }


def check_writable(path: Path, flag: str) -> None:
    """Before minutes of measuring. Raises ValueError unless a JSON object is there, or none yet, and can be written."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else "{}\n"
        if not isinstance(json.loads(text), dict):
            raise ValueError("it holds something else than a JSON object")
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} {path}: {error}; name a file of this command's, or a new one") from error


def machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    bf16 = ", native bfloat16" if torch.cpu._is_avx512_bf16_supported() else ""
    return f"{name}, {os.cpu_count()} cores{bf16}"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that was measured, marked when files had changed; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append: a results file is a history."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in records)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--save", action="store_true", help="append JSON lines to minisgl/benchmark/results/")
    group.add_argument("--out", type=Path, metavar="FILE", help="append JSON lines to this file")


def save(args: argparse.Namespace, records: Sequence[dict[str, Any]]) -> None:
    """Where `add_output_arguments` was told to, if it was. All records are of one bench."""
    path = RESULTS / f"{records[0]['bench']}.jsonl" if args.save else args.out
    if path is not None:
        write(path, records)
        print(f"appended to {path}", file=sys.stderr)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Linear between neighbours, as numpy's default."""
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned names, right-aligned figures; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)
