"""What was measured is written down whole, and no page gives a number of ours that no record has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from test_benchmark_commands import KEYS

from minisgl.benchmark.__main__ import COMMANDS
from minisgl.benchmark.records import RESULTS

ROOT = Path(__file__).parents[2]
SIMULATED = {"evidence", "simulation_error"}  # a line is a run of the simulated engine, with all its figures
MODELS = {"Qwen3-0.6B": "qwen3-0.6b", "Llama-3.1-8B": "llama-3.1-8b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}
METRICS = {  # by how the first cell of a line begins
    "offline": ("offline", {"output_throughput"}),
    "decode step": ("decode_step", {"step_p50", "floor"}),
    "one prompt": ("ttft", {"ttft_p50"}),
    "served": ("serving", {"tpot_p50"}),
}


def records(bench: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{bench}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("bench", sorted(path.stem for path in RESULTS.glob("*.jsonl")))
def test_every_record_says_enough_to_repeat_it(bench: str) -> None:
    commands = {"kernel": "kernels", "replay": "serving", "simulation_error": "simulation-error"}
    for entry in records(bench):
        assert entry["bench"] == bench
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", entry["commit"])
        assert date.fromisoformat(entry["date"])
        assert entry["machine"]
        assert {"python", "torch", "transformers"} <= entry["versions"].keys()
        what = entry["command"].removeprefix("python -m minisgl.benchmark ").split()[0]
        assert what in COMMANDS
        assert what == commands.get(bench, bench)
        if bench not in SIMULATED:
            assert entry.keys() == KEYS
            assert isinstance(entry["value"], int | float)


def tables(page: str) -> Iterator[list[list[str]]]:
    """Their lines' cells, without those of the header."""
    for block in re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.M):
        yield [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()[2:]]


def numbers(cell: str) -> list[tuple[float, int]]:
    """Each with its decimals."""
    found = re.findall(r"\d[\d,]*(?:\.\d+)?", cell)
    return [(float(text.replace(",", "")), len(text.partition(".")[2])) for text in found]


def is_recorded(number: float, decimals: int, values: list[float]) -> bool:
    return any(abs(value - number) <= 0.5 * 10**-decimals + 1e-9 for value in values)


def measured(label: str, before: tuple[str, set[str], str, int]) -> tuple[str, set[str], str, int]:
    """Bench, metrics, model and ranks of a line. before: those of the line above, which "the same" refers to."""
    bench, metrics, model, _ = before
    bench, metrics = next((found for words, found in METRICS.items() if label.startswith(words)), (bench, metrics))
    model = next((name for words, name in MODELS.items() if words in label), model)
    return bench, metrics, model, 2 if "`--tp 2`" in label else 1


@pytest.mark.parametrize("page", ["README.md", "chapters/optimisations.md"])
def test_numbers_of_gpus_are_those_of_records(page: str) -> None:
    checked = 0
    for table in tables(page):
        if not any(name in label for name in MODELS for label, *_ in table):
            continue
        what: tuple[str, set[str], str, int] = ("decode_step", METRICS["decode step"][1], "", 1)
        by_batch = table[0][0] in MODELS  # a line is a model, and only its last cell is another's
        for label, *cells in table:
            what = bench, metrics, model, tp = measured(label, what)
            known = [r for r in records(bench) if (r["model"], r["tp"]) == (model, tp) and r["metric"] in metrics]
            values = [entry["value"] for entry in known]
            for cell in cells[:-1] if by_batch else cells[:1]:
                for number, decimals in numbers(cell):
                    assert is_recorded(number, decimals, values), f"{label}: {number} is in no record"
                    checked += 1
    assert checked > 15, "the tables are not read any more"


def test_numbers_of_the_cpu_are_those_of_records() -> None:
    entries = [entry for entry in records("stages") if "cores" in entry["machine"]]
    values = [entry["value"] / (1e6 if entry["unit"] == "bytes" else 1) for entry in entries]
    (table,) = [table for table in tables("README.md") if table[0][0].startswith("one stream")]
    for label, *cells in table:
        for cell in cells:
            for number, decimals in numbers(re.sub(r"\([^)]*\)", "", cell)):
                assert is_recorded(number, decimals, values), f"{label}: {number} is in no record"
