"""Each measuring command from its arguments to its table and its records, on a model of a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_models import small
from tiny_model import make_tiny_model

from minisgl.benchmark.__main__ import COMMANDS, main
from minisgl.benchmark.models import CONFIGS
from minisgl.layers.norm import RMSNorm

SETTINGS = ("--dtype", "float32", "--threads", "1", "--num-pages", "256")
KEYS = {
    "bench",
    "model",
    "tp",
    "setting",
    "metric",
    "unit",
    "value",
    "machine",
    "versions",
    "command",
    "date",
    "commit",
}


@pytest.fixture
def weightless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A model name that stands for a small config without weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(CONFIGS, "qwen3-0.6b", small(CONFIGS["qwen3-0.6b"]))
    return "qwen3-0.6b"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class Result:
    def __init__(self, out: Path) -> None:
        self.records = [json.loads(line) for line in out.read_text().splitlines()]
        assert all(entry.keys() == KEYS for entry in self.records)

    def value(self, metric: str, setting: str = "") -> float:
        """Of the one record with this metric whose setting has these words in it."""
        at = [r for r in self.records if r["metric"] == metric and set(setting.split()) <= set(r["setting"].split())]
        (found,) = at
        return found["value"]


def run(out: Path, what: str, *arguments: str) -> Result:
    assert main([what, *arguments, *SETTINGS, "--out", str(out)]) == 0
    return Result(out)


def test_offline(tmp_path: Path, weightless: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path / "o", "offline", "--model", weightless, "--requests", "5", "--lengths", "2", "9")
    assert {r["bench"] for r in found.records} == {"offline"}
    assert {r["model"] for r in found.records} == {"qwen3-0.6b"}
    assert found.value("hit_tokens") == 0
    speeds = [found.value(f"{phase}_throughput") for phase in ("output", "prefill", "decode")]
    assert min(speeds) > 0
    shown = capsys.readouterr()
    assert "output_throughput" in shown.out
    assert "second run" in shown.err
    assert "second run" not in shown.out


def test_offline_counts_its_phases(tmp_path: Path, tiny: Path) -> None:
    """Tokens over the times of prefill and of decode must come to the time of the whole run, or nearly."""
    found = run(tmp_path / "o", "offline", "--model", str(tiny), "--requests", "8", "--lengths", "20", "30")
    from minisgl.benchmark.workload import OfflineWorkload

    load = OfflineWorkload.draw(8, (20, 30), 259)
    prompt, output = sum(map(len, load.prompts)), sum(load.output_lens)
    assert found.value("output_throughput") * found.value("run") == pytest.approx(output, rel=0.01)
    in_steps = prompt / found.value("prefill_throughput") + (output - 8) / found.value("decode_throughput")
    assert in_steps <= found.value("run") * 1.01
    assert found.records[0]["model"] == tiny.name
    assert "num_pages=256" in found.records[0]["setting"]


def test_decode_step(tmp_path: Path, tiny: Path) -> None:
    """Also of prompts that take more steps than the answers: 14 of 16 tokens, 16 at a time."""
    arguments = ("--model", str(tiny), "--batch", "1,14", "--context", "20", "--steps", "8", "--bandwidth", "10")
    found = run(tmp_path / "d", "decode_step", *arguments, "--max-prefill-length", "16")
    for batch in ("batch=1 ", "batch=14 "):
        assert 0 < found.value("step_p50", batch) <= found.value("step_p90", batch)
    assert 0 < found.value("floor", "batch=1 ") < found.value("floor", "batch=14 ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "300"], "--max-running-requests"),
        (["--batch", "64", "--context", "200", "--steps", "4"], "pool"),
        (["--context", "20"], "--steps 64"),
    ],
)
def test_decode_step_says_what_does_not_fit(
    tiny: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["decode_step", "--model", str(tiny), "--bandwidth", "10", *SETTINGS, *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_ttft_and_prefill(tmp_path: Path, tiny: Path) -> None:
    arguments = ("--model", str(tiny), "--prompt-len", "12", "--requests", "3", "--repeat", "2")
    ttft = run(tmp_path / "t", "ttft", *arguments)
    assert 0 < ttft.value("ttft_p50") <= ttft.value("ttft_p90") <= ttft.value("ttft_p99")
    prefill = run(tmp_path / "p", "prefill", *arguments)
    assert prefill.value("prefill_throughput") > 0
    assert "max_prefill_length=16384" in prefill.records[0]["setting"]


def test_kernels(
    tmp_path: Path, weightless: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.benchmark.kernels.CPU_SECONDS", 0.0)
    found = run(
        tmp_path / "k", "kernels", "--model", weightless, "--batch", "2", "--context", "40", "--bandwidth", "10"
    )
    assert found.value("time", "kernel=attention_decode form=torch") > 0
    assert found.value("time", "kernel=sample_drawn form=minisgl") > 0
    share, speed = (found.value(name, "kernel=lm_head form=torch") for name in ("of_memory", "bandwidth"))
    assert share == pytest.approx(10 * speed, abs=0.001), "of 10 GB/s"
    assert not [r for r in found.records if r["metric"] == "bandwidth" and "attention_metadata" in r["setting"]]
    assert "lm_head" in capsys.readouterr().out


def test_kernel_forms_compute_the_same(weightless: str) -> None:
    """A form that computes something else is not comparable. Draws differ, and preparations are no tensors."""
    from minisgl.benchmark import kernel_cases, sampling_cases
    from minisgl.benchmark.kernel_cases import Shape
    from minisgl.models.config import ModelConfig

    shape = Shape(ModelConfig.from_dict(CONFIGS[weightless]), torch.float32, torch.device("cpu"), 3, 40, 16)
    cases = {**kernel_cases.CASES, "sample_greedy": sampling_cases.greedy}
    for name in cases.keys() - {"attention_metadata"}:
        forms = cases[name](shape).forms
        expected = forms["torch"]()
        for form, call in forms.items():
            torch.testing.assert_close(
                call(), expected, check_dtype=False, msg=lambda m, at=f"{name}/{form}": f"{at}: {m}"
            )


@pytest.mark.parametrize(("name", "tokens"), [("attention_decode", 3), ("attention_prefill", 2 * 40)])
def test_what_attention_is_timed_with(weightless: str, monkeypatch: pytest.MonkeyPatch, name: str, tokens: int) -> None:
    """A prompt's first token attends to itself alone. Of three prompts of 40 tokens two fit into a step of 100."""
    from minisgl.benchmark import kernel_cases
    from minisgl.benchmark.kernel_cases import Shape
    from minisgl.models.config import ModelConfig

    drawn: list[torch.Tensor] = []
    draw = Shape.random
    monkeypatch.setattr(Shape, "random", lambda self, *sizes: drawn.append(draw(self, *sizes)) or drawn[-1])
    monkeypatch.setattr(kernel_cases, "MOST_TOKENS", 100)
    shape = Shape(ModelConfig.from_dict(CONFIGS[weightless]), torch.float32, torch.device("cpu"), 3, 40, 16)
    out = kernel_cases.CASES[name](shape).forms["torch"]()
    assert isinstance(out, torch.Tensor)
    q, _, v = drawn
    assert out.shape == q.shape == (tokens, 4, 16)
    alone = torch.isclose(out, v.repeat_interleave(2, dim=1)).all(dim=(1, 2))  # [tokens]
    assert alone.nonzero().flatten().tolist() == ([] if name == "attention_decode" else [0, 40])


@pytest.mark.slow
def test_ablation(tmp_path: Path, weightless: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", weightless, "--requests", "3", "--lengths", "2", "5", "--only", "overlap,radix")
    found = run(tmp_path / "a", "ablation", *arguments)
    for variant in ("as_given", "disable_overlap_True", "cache_naive", "as_given,_again"):
        assert found.value("output_throughput", f"variant={variant}") > 0
    settings = {r["setting"] for r in found.records if "disable_overlap_True" in r["setting"]}
    assert all("disable_overlap=True" in setting for setting in settings), "the switch is not in the record"
    assert len(capsys.readouterr().out.splitlines()) == 6


@pytest.mark.slow
def test_check_model(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["check-model", str(tiny), "--max-tokens", "3", "--prompt", "Hello there", "--threads", "1"]
    assert main(arguments) == 0
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("SAME") == 2
    assert "100%" in shown
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: x)
    assert main(arguments) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.slow
def test_serving(tmp_path: Path, weightless: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The one test here that starts a process: our server, which sends every token as a chunk."""
    lengths = ("--streams", "1,3", "--input-len", "60", "--output-len", "9", "--repeat", "2")
    found = run(tmp_path / "s", "serving", "--model", weightless, *lengths)
    for streams in ("streams=1", "streams=3"):
        for name in ("ttft", "tpot", "itl"):  # two tokens may come in one read: a gap of 0
            assert 0 <= found.value(f"{name}_p50", streams) <= found.value(f"{name}_p99", streams)
        assert found.value("ttft_p50", streams) > 0
        assert found.value("throughput", streams) > 0
    (setting,) = {r["setting"].split(" dtype")[0] for r in found.records if "streams=3" in r["setting"]}
    fields = dict(pair.split("=") for pair in setting.split())
    assert fields["answers"] == "6"
    assert abs(int(fields["input_len"]) - 60) <= 12
    assert "TPOT p50" in capsys.readouterr().out


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for what in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([what, "--help"])
        assert ended.value.code == 0
    assert "--cuda-graph-max-bs" in capsys.readouterr().out


def test_a_wrong_setting_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["offline", "--model", str(tmp_path / "none")],
        ["ttft", "--page-size", "0"],
        ["kernels", "--only", "x"],
        ["stages", "--stages", "x"],
        ["stages", "--stages", "3,9"],
        ["stages", "--threads", "100000"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
