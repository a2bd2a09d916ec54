"""What more GPUs bought: one model's recorded numbers side by side, by the ranks that gave them. Measures nothing.

python -m minisgl.benchmark scaling --model llama-3.1-8b [--records FILE ...]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.benchmark.records import RESULTS, table

SHOWN = {
    ("offline", "output_throughput"): "offline",
    ("decode_step", "step_p50"): "decode step",
    ("decode_step", "floor"): "its floor",
}


class Line(NamedTuple):
    """What two numbers must have in common to be compared."""

    what: str
    unit: str
    setting: str
    device: str  # without how many there were


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3.1-8b", help="as in the records")
    files = [RESULTS / "offline.jsonl", RESULTS / "decode_step.jsonl"]
    parser.add_argument(
        "--records", type=Path, nargs="+", default=files, metavar="FILE", help="as --save or --out wrote"
    )


def main(args: argparse.Namespace) -> None:
    """Raises ValueError when there is nothing to compare."""
    found = by_ranks(entry for path in args.records for entry in read(path) if entry["model"] == args.model)
    found = {line: values for line, values in found.items() if len(values) > 1}
    if not found:
        raise ValueError(
            f"nothing of {args.model!r:.80} was recorded at two --tp, all else the same: run offline and decode_step"
        )
    print(show(found))


def read(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"records {path} cannot be read: {error.strerror}") from None


def by_ranks(records: Iterable[dict[str, Any]]) -> dict[Line, dict[int, float]]:
    """Ranks to value. A file is a history: the last of each counts."""
    found: dict[Line, dict[int, float]] = {}
    for entry in records:
        if what := SHOWN.get((entry["bench"], entry["metric"])):
            device = re.sub(r"^\d+ x ", "", entry["machine"])
            found.setdefault(Line(what, entry["unit"], entry["setting"], device), {})[entry["tp"]] = entry["value"]
    return found


def show(found: dict[Line, dict[int, float]]) -> str:
    """Beside each value how many times better it is than with the fewest ranks."""
    ranks = sorted({tp for values in found.values() for tp in values})
    rows = [["", "unit", *(f"tp {tp}" for tp in ranks), "with"]]
    for line, values in found.items():
        is_rate, first = line.unit.endswith("/s"), values[min(values)]
        cells = []
        for tp in ranks:
            value = values.get(tp)
            better = 0.0 if value is None else value / first if is_rate else first / value
            cells.append("" if value is None else f"{value:,.{0 if is_rate else 3}f} ({better:.2f} x)")
        rows.append([line.what, line.unit, *cells, f"{line.setting}, {line.device}"])
    return table(rows)
