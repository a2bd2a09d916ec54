"""Simulated runs: the same bytes for the same seed, nothing lost, prefixes as described, time as computed by hand."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_model import make_tiny_model

from minisgl.benchmark import fit_device
from minisgl.benchmark import simulate as command
from minisgl.benchmark.__main__ import main
from minisgl.benchmark.arrivals import TURNS, WORKLOADS, Arrival, Load, Segment, asking_for
from minisgl.benchmark.fit_device import CASES, RATES, TOKENS, Measured, errors, fit
from minisgl.benchmark.simulation import NEVER, Result, simulate
from minisgl.benchmark.trace_file import read_trace
from minisgl.core.trace import read_events
from minisgl.models.config import ModelConfig
from minisgl.stage5.cost_model import H200, CostModel, Device, StepShape
from minisgl.stage5.simulated_engine import Step
from minisgl.stage7.config import OverlapConfig

MODEL = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
)
MOONCAKE = """
{"timestamp": 1000, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 1500, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 10]}
{"timestamp": 1500, "input_length": 1024, "output_length": 4, "hash_ids": [7, 11]}
{"timestamp": 4000, "input_length": 1300, "output_length": 1, "hash_ids": [7, 8, 9]}
"""
BAILIAN = """
{"chat_id": 1, "parent_chat_id": -1, "timestamp": 2.5, "input_length": 40, "output_length": 9, "type": "text",\
 "turn": 1, "hash_ids": [5, 6, 7]}
{"chat_id": 2, "parent_chat_id": 1, "timestamp": 3.75, "input_length": 70, "output_length": 2, "type": "text",\
 "turn": 2, "hash_ids": [5, 6, 8, 9]}
"""


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def run(arrivals: list[Arrival], device: Device = H200, **settings: object) -> Result:
    return simulate(arrivals, OverlapConfig(**{"num_pages": 4096, **settings}), MODEL, device)  # type: ignore[arg-type]


def common_prefix(a: Arrival, b: Arrival) -> int:
    pairs = zip(a.prompt_ids(), b.prompt_ids(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def check_whole(result: Result) -> None:
    """Every request has all its tokens, in order of time, and every page and row is back."""
    outputs = np.array([arrival.output_len for arrival in result.arrivals])
    assert len(result.gaps) == (outputs - 1).sum()
    assert (result.gaps > 0).all()
    assert (result.first > result.arrived).all()
    assert ((result.last - result.first) * (outputs > 1) >= 0).all()
    assert result.gaps.sum() == (result.last - result.first).sum()
    stats = result.stats
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_served_whole(name: str, overlap: bool) -> None:
    arrivals = WORKLOADS[name](Load(80, 200.0, prompt_len=60, output_len=12, seed=3))
    assert sorted(arrival.uid for arrival in arrivals) == list(range(80))
    check_whole(
        run(arrivals, num_pages=160, max_running_requests=6, max_prefill_length=128, disable_overlap=not overlap)
    )


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_answers_end_before_max_tokens(name: str, overlap: bool) -> None:
    """All have the tokens that were described, whatever they ask for; and whoever estimates has more of them at once in
    a pool where each may ask for a third of it."""
    arrivals = asking_for(300, WORKLOADS[name](Load(60, 1000.0, prompt_len=30, output_len=12, seed=3)))
    steps = {}
    for admission in ("reserve", "estimate"):
        result = run(arrivals, num_pages=60, admission=admission, disable_overlap=not overlap)
        check_whole(result)
        steps[admission] = len(result.steps)
    assert steps["estimate"] < steps["reserve"]


@pytest.mark.parametrize("workload", [*WORKLOADS, "trace"])
def test_same_seed_same_bytes(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mooncake.jsonl").write_text(MOONCAKE)
    which = str(tmp_path / "mooncake.jsonl") if workload == "trace" else workload
    rate = () if workload == "trace" else ("--rate", "50")
    seen = []
    for seed, trace in (("1", "a"), ("1", "b"), ("2", "c")):
        words = ("--workload", which, *rate, "--requests", "40", "--seed", seed, "--json", "--prompt-len", "40")
        command.main(options(*words, "--output-len", "9", "--trace", str(tmp_path / trace)))
        seen.append((capsys.readouterr().out, (tmp_path / trace).read_bytes()))
    assert seen[0] == seen[1]
    assert (seen[0] == seen[2]) == (workload == "trace"), "the seed decides, but for what is on record"


def test_chats_find_the_turn_before(tmp_path: Path) -> None:
    """A turn hits every whole page of the last prompt and its answer, whose last token was never computed."""
    arrivals = WORKLOADS["multi-turn"](Load(40, 10.0, prompt_len=50, output_len=20))
    result = run(arrivals, page_size=4)
    for uid, arrival in enumerate(arrivals):
        if uid % TURNS == 0:
            assert result.cached[uid] == 0
            continue
        last = arrivals[uid - 1]
        assert arrival.segments[: len(last.segments)] == last.segments
        assert result.cached[uid] == (last.prompt_len + last.output_len - 1) // 4 * 4
        assert result.arrived[uid] == result.last[uid - 1] + arrival.time_ns


def test_groups_share_their_prefix_and_nothing_else() -> None:
    arrivals = WORKLOADS["shared-prefix"](Load(96, None, prompt_len=80, output_len=2))
    shared = {arrival.uid: arrival.segments[0] for arrival in arrivals}
    assert len(set(shared.values())) == 3
    for a, b in itertools.combinations(arrivals[:40], 2):
        assert common_prefix(a, b) == (shared[a.uid].end if shared[a.uid] == shared[b.uid] else 0)


@pytest.mark.parametrize("name", ["uniform", "lognormal", "long-prompt"])
def test_nothing_is_shared_by_chance(name: str) -> None:
    """At page size 1 any first token in common would be a hit; the same prompts and answers come near it nowhere."""
    arrivals = WORKLOADS[name](Load(120, None, prompt_len=20, output_len=20))
    assert run(arrivals, page_size=1, num_pages=20000).cached.sum() == 0


@pytest.mark.parametrize(("text", "size"), [(MOONCAKE, 512), (BAILIAN, 16)], ids=["mooncake", "bailian"])
def test_trace_files_share_what_their_hashes_say(text: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    rows = [json.loads(line) for line in text.split("\n") if line]
    arrivals = read_trace(path, 100)
    assert [(a.prompt_len, a.output_len) for a in arrivals] == [(r["input_length"], r["output_length"]) for r in rows]
    for (a, row_a), (b, row_b) in itertools.combinations(zip(arrivals, rows, strict=True), 2):
        pairs = zip(row_a["hash_ids"], row_b["hash_ids"], strict=False)
        blocks = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert common_prefix(a, b) == min(blocks * size, a.prompt_len, b.prompt_len)


def test_trace_file_times(tmp_path: Path) -> None:
    """Mooncake counts milliseconds and Bailian seconds; both from their first request."""
    (tmp_path / "m").write_text(MOONCAKE)
    (tmp_path / "b").write_text(BAILIAN)
    assert [a.time_ns for a in read_trace(tmp_path / "m", 9)] == [0, 500_000_000, 500_000_000, 3_000_000_000]
    assert [a.time_ns for a in read_trace(tmp_path / "b", 9, 2.0)] == [0, 2_500_000_000]
    assert [a.time_ns for a in read_trace(tmp_path / "m", 2, 0.0)] == [0, 0]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2, 3]}',
            "3 hash_ids for 600 tokens",
        ),
        ('{"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [1, 2]}', "output_length must be"),
        ('{"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}', "'output_length' is missing"),
        ('{"timestamp": -1, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}', "timestamp -1 is before"),
        ('{"timestamp": "0", "input_length": 5, "output_length": 2, "hash_ids": []}', "timestamp must be .* not '0'"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 2, "hash_ids": []}', "timestamp must be .* not nan"),
        (
            '{"timestamp": 0, "input_length": 5.0, "output_length": 2, "hash_ids": []}',
            "input_length must be .* not 5.0",
        ),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": ["a"]}',
            r"hash_ids must be .* \['a'\]",
        ),
        ('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": 7}', "hash_ids must be .* not 7"),
        ("[]", r"'\[\]' is no object"),
        ("version https://git-lfs.github.com/spec/v1", "'version https.*' is no JSON"),
    ],
)
def test_a_bad_line_is_named(line: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}\n' + line)
    with pytest.raises(ValueError, match=rf"^line 2 of .*: .*{error}.*: mend this one, or delete it$"):
        read_trace(path, 9)


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").write_text("\n")
    for name, words in (("missing", "cannot be read"), ("binary", "is not UTF-8"), ("empty", "holds no request")):
        with pytest.raises(ValueError, match=f"trace .*{name} {words}"):
            read_trace(tmp_path / name, 9)


def one_request(device: Device, output_len: int, disable_overlap: bool) -> tuple[int, list[int]]:
    """When its last token came, and what each step took on the device; both in nanoseconds."""
    result = run([Arrival(0, (Segment(0, 10),), output_len, 0)], device, disable_overlap=disable_overlap)
    return int(result.last[0]), [step.end - step.start for step in result.steps]


@pytest.mark.parametrize("host_s", [1e-5, 5e-3], ids=["device-bound", "host-bound"])
def test_a_step_takes_the_longer_of_host_and_device(host_s: float) -> None:
    """With overlap: the first schedule, then max(host, device) for each of the 9 steps that another follows, then the
    last step. Without: the sum."""
    device = dataclasses.replace(H200, layer_s=1e-3, eager_layer_s=0.0, host_step_s=host_s, host_request_s=0.0)
    host = round(host_s * 1e9)
    end, steps = one_request(device, 10, disable_overlap=True)
    assert end == sum(host + step for step in steps)
    end, steps = one_request(device, 10, disable_overlap=False)
    assert end == host + sum(max(host, step) for step in steps[:-1]) + steps[-1]


def test_percentiles_by_hand() -> None:
    """Two requests of 3 and 1 tokens on a clock of milliseconds; a third one was refused."""
    arrivals = [Arrival(uid, (Segment(2 * uid, 8),), n, 0) for uid, n in ((0, 3), (1, 1), (2, 5))]
    times = [np.array(row) * 10**6 for row in ([0, 10, 0], [20, 50, 0], [60, 50, 0])]
    for row in times:
        row[2] = NEVER
    steps = [step_of(5, 20, (0,)), step_of(20, 30, (0, 1)), step_of(40, 60, ())]  # 0 in two chunks
    gaps = np.array([10, 30]) * 10**6
    result = Result(arrivals, *times, np.array([4, 0, 0]), gaps, steps, {"pages_total": 9, "retracted": 2}, 4)
    figures = command.summary(result)
    assert figures["ms"]["TTFT"] == {"p50": 30.0, "p90": 38.0, "p99": 39.8, "max": 40.0}
    assert figures["ms"]["ITL"] == {"p50": 20.0, "p90": 28.0, "p99": 29.8, "max": 30.0}
    assert figures["ms"]["E2E"] == {"p50": 50.0, "p90": 58.0, "p99": 59.8, "max": 60.0}
    assert figures["ms"]["queue"] == {"p50": 7.5, "p90": 9.5, "p99": 9.95, "max": 10.0}
    assert (figures["requests"], figures["refused"], figures["most_queued"]) == (3, 1, 1)
    assert (figures["seconds"], figures["output_tokens_s"]) == (0.06, round(4 / 0.06, 1))
    assert (figures["cache_hit_rate"], figures["device_busy"]) == (0.25, 0.75)
    assert (figures["pages_high_water"], figures["retracted"]) == (5, 2)
    shown = [" ".join(line.split()) for line in command.show(figures).splitlines()]
    assert any("output tokens/s" in line and "66.7" in line for line in shown)
    result.steps.append(step_of(60, 90, ()))  # begun before the last answer's end was known
    assert command.summary(result)["device_busy"] == 1


def step_of(start: int, end: int, extended: tuple[int, ...]) -> Step:
    return Step(start * 10**6, end * 10**6, StepShape(1, 8), extended)


def test_most_at_once() -> None:
    """A span that begins where another ends does not meet it."""
    assert command.most_at_once(np.array([0, 5, 5, 9]), np.array([5, 9, 7, 12])) == 2


def test_what_can_never_fit_is_refused_and_the_rest_served() -> None:
    lengths = ((50, 10), (9000, 10), (600, 60), (50, 10))  # the second passes the model's limit, the third the pool
    arrivals = [Arrival(uid, (Segment(2 * uid, n),), m, 0) for uid, (n, m) in enumerate(lengths)]
    arrivals.append(Arrival(4, (Segment(8, 5),), 1, 10, after=1))  # would follow an answer that never comes
    result = run(arrivals, num_pages=40)
    assert (result.last != NEVER).tolist() == [True, False, False, True, False]
    assert command.summary(result)["refused"] == 3
    with pytest.raises(ValueError, match="no request has at most 8192 tokens, .*: give shorter ones"):
        run(arrivals[1:2])
    with pytest.raises(ValueError, match="no request has at most 600 tokens, .*: raise --max-seq-len"):
        run(arrivals[2:3], max_seq_len=600)


def test_the_budget_is_the_simulated_devices() -> None:
    """Not that of the machine on which it is simulated; and what was asked for is what it is."""
    on_cpu = dataclasses.replace(H200, type="cpu")
    assert [command.engine_config(options(), device).max_prefill_length for device in (H200, on_cpu)] == [2048, 256]
    assert command.engine_config(options("--max-prefill-length", "77"), on_cpu).max_prefill_length == 77
    with pytest.raises(ValueError, match="--max-prefill-length must be at least 1, not 0"):
        command.engine_config(options("--max-prefill-length", "0"), on_cpu)


def test_arrivals_have_the_rate_and_bursts_are_bursts() -> None:
    """Requests in each second: of Poisson arrivals the variance is the mean, of bursts it is many times that."""
    spread = {}
    for name in ("uniform", "bursts"):
        times = np.array([a.time_ns for a in WORKLOADS[name](Load(20000, 50.0))]) / 1e9
        assert 20000 / times[-1] == pytest.approx(50, rel=0.2)
        assert (np.diff(times) >= 0).all()
        counts = np.bincount(times.astype(int))[:-1]
        spread[name] = counts.var() / counts.mean()
    assert spread["uniform"] == pytest.approx(1, rel=0.25)
    assert spread["bursts"] > 20


def test_lengths_have_their_means() -> None:
    for name in ("uniform", "lognormal"):
        arrivals = WORKLOADS[name](Load(20000, None, prompt_len=300, output_len=40))
        assert np.mean([a.prompt_len for a in arrivals]) == pytest.approx(300, rel=0.05)
        assert np.mean([a.output_len for a in arrivals]) == pytest.approx(40, rel=0.05)


def test_trace_is_in_virtual_time(tmp_path: Path) -> None:
    arrivals = WORKLOADS["uniform"](Load(10, None, prompt_len=20, output_len=5))
    result = simulate(arrivals, OverlapConfig(num_pages=100), MODEL, H200, tmp_path / "trace.json")
    spans = [event for event in read_events(tmp_path / "trace.json") if event.track == "device"]
    assert [(span.ts, span.ts + (span.duration or 0)) for span in spans] == [(s.start, s.end) for s in result.steps]
    assert [span.args["requests"] for span in spans] == [step.shape.num_requests for step in result.steps]


def test_a_fit_finds_the_device_that_made_the_times() -> None:
    """Steps timed by the model itself, on both sides of the roofline."""
    true = Device("true", "cpu", "bfloat16", 2e11, 2e10, 5e10, 4e9, 1 << 34, 1e-4, 0.0, 3e-4, 2e-5)
    cost = CostModel(MODEL, true)
    shapes = [StepShape(n, n * length) for n, length in ((1, 50), (1, 4000), (16, 100), (64, 900))]
    shapes += [StepShape(0, 0, ((0, n),)) for n in (30, 400, 3000, 8000)] + [StepShape(0, 0, ((0, 30),) * 100)]
    steps = [Measured(shape, cost.host_seconds(shape), cost.device_seconds(shape)) for shape in shapes]
    start = dict(zip(RATES, (1e11, 1e10, 1e11, 1e10), strict=True))
    found = fit(steps, MODEL, dataclasses.replace(true, layer_s=0.0, host_step_s=0.0, **start))
    assert errors(steps, CostModel(MODEL, found))["max"] < 1e-3
    for name in (*RATES, "layer_s", "host_step_s", "host_request_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-2), name


@pytest.mark.slow
def test_this_machine_measured_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands, one after the other, on a model of a few kilobytes."""
    folder, out = str(make_tiny_model(tmp_path, max_position_embeddings=2048)), tmp_path / "fit.json"
    assert main(["fit-device", "--model", folder, "--dtype", "float32", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    whole, chunked = found["steps"][: len(CASES) * TOKENS], found["steps"][len(CASES) * TOKENS :]
    sizes = [step["num_decode"] + len(step["extends"]) for step in whole]
    assert sizes == [requests for requests, _ in CASES for _ in range(TOKENS)]
    for steps in (whole, chunked):
        computed = sum(end - start for step in steps for start, end in step["extends"])
        assert computed == sum(n * length for n, length in CASES)
    assert any(step["num_decode"] and step["extends"] for step in chunked), "no mixed step"
    assert all(step["host_s"] > 0 and step["device_s"] > 0 for step in found["steps"])
    device = Device.from_file(out)
    assert device.layer_s + 1 / device.flops + 1 / device.bandwidth > 0
    capsys.readouterr()
    words = ["simulate", "--device", f"cpu:{out}", "--model-config", folder, "--requests", "20", "--prompt-len", "50"]
    assert main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["requests"], figures["refused"]) == (20, 0)
    assert 0 < figures["ms"]["TTFT"]["p50"] <= figures["ms"]["TTFT"]["max"] <= figures["ms"]["E2E"]["max"]
    assert main([*words, "--max-running-requests", "2"]) == 0
    assert "requests a step" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has 512 positions, and 1028 are measured"):
        fit_device.main(argparse.Namespace(model=str(make_tiny_model(tmp_path / "short")), dtype="float32", threads=1))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--workload", "unifrom"], "--workload must be uniform, .* or a trace file, not 'unifrom'"),
        (["--workload", "bursts"], "bursts need --rate"),
        (["--rate", "-1"], r"--rate must be a number above 0, not -1\.0"),
        (["--max-tokens", "9"], "--max-tokens 9 would cut answers: the longest of this workload has 230"),
        (["--requests", "0"], "--requests must be at least 1, not 0"),
        (["--device", "h300"], "--device must be h200 or cpu:FIT.json, not 'h300'"),
        (["--device", "cpu:nowhere.json"], "nowhere.json is no fit of a device"),
        (["--model-config", "/nowhere"], "/nowhere is no model folder"),
        (["--page-size", "0"], "--page-size must be at least 1"),
    ],
)
def test_bad_settings_are_named(words: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        command.main(options(*words))
