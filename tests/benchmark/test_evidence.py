"""The tables of evidence: every policy, admission and setting is in them, once each, and what they say is the run's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from tiny_model import make_tiny_model

from minisgl.benchmark import evidence, simulate
from minisgl.benchmark.__main__ import main
from minisgl.benchmark.arrivals import WORKLOADS
from minisgl.kernel.device import prefill_length
from minisgl.stage7.config import OverlapConfig

WORDS = ["--requests", "12", "--rate", "300", "--prompt-len", "20", "--output-len", "6", "--max-tokens", "100"]
DEFAULTS = [OverlapConfig(max_prefill_length=prefill_length(torch.device(name))) for name in ("cpu", "cuda")]


def test_tables_hold_every_choice_once() -> None:
    tables = evidence.tables(OverlapConfig(num_pages=128))
    policies = {(config.schedule_policy, config.admission) for config in tables["policies"].values()}
    assert len(policies) == len(tables["policies"]) == 6
    assert {config.num_pages * config.page_size for config in tables["page_size"].values() if config.num_pages} == {
        2048
    }
    for name, values in evidence.SWEEPS.items():
        assert [getattr(config, name) for config in tables[name].values()] == list(values)
        assert {getattr(default, name) for default in DEFAULTS} <= set(values), "what it is compared with is not there"


@pytest.mark.slow
def test_lines_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = str(make_tiny_model(tmp_path)), tmp_path / "lines.jsonl"
    words = [*WORDS, "--model-config", folder, "--num-pages", "40"]
    assert main(["evidence", *words, "--only", "policies", "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    pairs = {(line["workload"], line["setting"]) for line in lines}
    assert len(pairs) == len(lines) == 6 * len(WORKLOADS)
    assert len(printed) == 3 + len(lines) + 1, "a title, a header, a row each"
    for line in lines:
        assert line["requests"] == 12
        assert line["steps"] > 0
        assert {"p50", "p99", "max"} <= set(line["ms"]["TTFT"])
        assert line["command"]
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    args = parser.parse_args([*words, "--workload", "bursts", "--admission", "reserve"])
    config = simulate.engine_config(args, simulate.H200)
    model = simulate.model_config(folder)
    alone = simulate.summary(simulate.simulate(simulate.workload(args), config, model, simulate.H200))
    [same] = [line for line in lines if (line["workload"], line["setting"]) == ("bursts", "mixed, reserve")]
    assert {name: same[name] for name in alone} == alone


def test_overhead_is_the_machines_own_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = str(make_tiny_model(tmp_path)), tmp_path / "lines.jsonl"
    assert main(["evidence", *WORDS, "--model-config", folder, "--only", "overhead", "--out", str(out)]) == 0
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [line["setting"] for line in lines] == ["overhead, cache=radix", "overhead, cache=naive"]
    assert all(line["cpu_s"] > 0 and line["cache_hit_rate"] == 0 for line in lines)
    assert "us a request" in capsys.readouterr().out
