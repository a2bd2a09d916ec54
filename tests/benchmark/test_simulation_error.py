"""The same arrivals, simulated and served by a real engine: the same steps where time does not decide them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_model import make_tiny_model

from minisgl.benchmark import simulation_error
from minisgl.benchmark.__main__ import main
from minisgl.benchmark.arrivals import WORKLOADS, Arrival, Load, Segment, asking_for
from minisgl.benchmark.simulation import simulate
from minisgl.models.config import ModelConfig
from minisgl.stage5.cost_model import H200
from minisgl.stage5.simulated_engine import answer_stream
from minisgl.stage7.config import OverlapConfig


@pytest.mark.parametrize("admission", ["reserve", "estimate"])
def test_both_take_the_same_steps(admission: str, tmp_path: Path) -> None:
    """All requests at once, so that no clock decides; answers end early, chunks, shared prefixes, a tight pool."""
    folder = make_tiny_model(tmp_path)
    model = ModelConfig.from_folder(folder)
    arrivals = asking_for(40, WORKLOADS["shared-prefix"](Load(40, None, prompt_len=60, output_len=10)))
    config = OverlapConfig(
        num_pages=40, max_prefill_length=50, disable_overlap=True, device="cpu", max_seq_len=200, admission=admission
    )
    engine = simulation_error.real_engine(config, folder, model)
    real, virtual = simulation_error.measured(engine, arrivals, config), simulate(arrivals, config, model, H200)
    assert [(step.shape, step.extended) for step in real.steps] == [(s.shape, s.extended) for s in virtual.steps]
    assert (real.cached == virtual.cached).all()
    assert real.cached.sum() > 0
    assert real.stats == virtual.stats
    assert (real.first > real.arrived).all()


def test_a_turn_finds_the_answer_before_it(tmp_path: Path) -> None:
    """Though the real model said something else."""
    folder = make_tiny_model(tmp_path)
    model = ModelConfig.from_folder(folder)
    first = Arrival(0, (Segment(0, 20),), 13, 0)
    second = Arrival(1, (*first.segments, Segment(answer_stream(0), 33), Segment(2, 40)), 3, 1000, after=0)
    config = OverlapConfig(page_size=4, num_pages=40, disable_overlap=True, device="cpu", max_seq_len=90)
    engine = simulation_error.real_engine(config, folder, model)
    result = simulation_error.measured(engine, [first, second], config)
    assert result.cached.tolist() == [0, 32]
    assert (np.diff(result.arrived) > 0).all()


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(make_tiny_model(tmp_path, max_position_embeddings=2048))
    fit, out = str(tmp_path / "fit.json"), tmp_path / "lines.jsonl"
    assert main(["fit-device", "--model", folder, "--dtype", "float32", "--out", fit]) == 0
    words = ["--model-config", folder, "--requests", "8", "--rate", "200", "--prompt-len", "20", "--output-len", "5"]
    device = ["--device", f"cpu:{fit}"]
    assert main(["simulation-error", *device, *words, "--only", "uniform", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["measured"]["requests"] == found["simulated"]["requests"] == 8
    for name, quantile in simulation_error.COMPARED:
        real, virtual = (found[which]["ms"][name][quantile] for which in ("measured", "simulated"))
        assert found["error"]["ms"][name][quantile] == pytest.approx(virtual / real - 1)
    assert "uniform, error" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["simulation-error", "--device", "h200", *words])
    assert "this machine's own fit, not 'h200'" in capsys.readouterr().err
