"""What is recorded of a GPU: read, brought to the trace's clock, cut and written as it was. On a CPU that plays one."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
from small_models import small
from torch.profiler import ProfilerActivity, profile

import minisgl
from minisgl.benchmark.__main__ import main
from minisgl.benchmark.device_trace import Kernel, Launch, read_profile, short_name
from minisgl.benchmark.models import CONFIGS
from minisgl.benchmark.trace_cut import (
    cut_kernels,
    cut_steps,
    fullest_prefill,
    last_steps,
    layer_spans,
    provenance,
    write,
)
from minisgl.core.trace import Event, read_events

US = 1000


@pytest.fixture
def weightless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A model name that stands for a small config without weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(CONFIGS, "qwen3-0.6b", small(CONFIGS["qwen3-0.6b"]))
    fake_gpu.pretend(monkeypatch)
    return "qwen3-0.6b"


def record(out: Path, model: str, *arguments: str) -> dict[str, list[Event]]:
    settings = ("--dtype", "float32", "--threads", "1", "--num-pages", "64", "--steps", "16")
    assert main(["record-trace", *arguments, "--model", model, *settings, "--out", str(out)]) == 0
    assert not list(out.glob("*.jsonl"))
    return {path.stem: read_events(path) for path in sorted(out.glob("*.json"))}


def item(name: str, kind: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "args": args}


def test_kernels_have_the_launch_that_asked_for_them() -> None:
    """A call of the driver inside one of the runtime has its number; a graph's kernels have one launch; what nothing
    came of, and what is no launch, is left out."""
    items = [
        item("cuLaunchKernelEx", "cuda_driver", 11, 3, correlation=5),
        item("cudaLaunchKernel", "cuda_runtime", 10, 5, correlation=5),
        item("cudaGraphLaunch", "cuda_runtime", 20, 6, correlation=6),
        item("cudaEventRecord", "cuda_runtime", 30, 1, correlation=7),
        item("cuLaunchKernel", "cuda_driver", 1, 1, correlation=8),
        item("void a::gemv<4>(x)", "kernel", 30, 2.5, correlation=6, stream=9),
        item("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 40, 1, correlation=6, stream=9),
        item("norm", "kernel", 18, 2, correlation=5, stream=7),
        item("first", "kernel", 2, 2, correlation=8, stream=7),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1, "args": {}},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        item("aten::mm", "cpu_op", 1, 2),
    ]
    kernels, launches = read_profile({"baseTimeNanoseconds": 1_000_000, "traceEvents": items}, 900_000)
    base = 100_000
    assert kernels == [
        Kernel("first", base + 2 * US, base + 4 * US, 7, 8),
        Kernel("norm", base + 18 * US, base + 20 * US, 7, 5),
        Kernel("gemv", base + 30 * US, base + 32_500, 9, 6),
        Kernel("Memcpy DtoH", base + 40 * US, base + 41 * US, 9, 6),
    ]
    assert launches == [
        Launch("cuLaunchKernel", base + 1 * US, base + 2 * US, 8),
        Launch("cudaLaunchKernel", base + 10 * US, base + 15 * US, 5),
        Launch("cudaGraphLaunch", base + 20 * US, base + 26 * US, 6),
    ]


def test_the_profilers_clock_becomes_the_traces(tmp_path: Path) -> None:
    """With torch's own file: an operator lies between two looks at CLOCK_MONOTONIC."""
    x = torch.ones(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        before = time.monotonic_ns()
        x @ x
        after = time.monotonic_ns()
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    document = json.loads((tmp_path / "profile.json").read_text())
    for one in document["traceEvents"]:
        if one["name"] == "aten::mm":
            one["cat"], one["args"] = "kernel", {"correlation": 1, "stream": 7}
    ((_, start, end, *_),) = read_profile(document, time.time_ns() - time.monotonic_ns())[0]
    slack = 100 * US  # two clocks are read one after the other
    assert before - slack <= start < end <= after + slack


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::F<int> >(int, int)", "vectorized_elementwise_kernel"),
        ("void at::native::(anonymous namespace)::indexSelectSmallIndex<a::B, 2>(x)", "indexSelectSmallIndex"),
        ("ncclDevKernel_AllReduce_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllReduce_RING_LL"),
        ("_norm_gemv_kernel", "_norm_gemv_kernel"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
    ],
)  # fmt: skip
def test_names_are_short(kernel: str, name: str) -> None:
    assert short_name(kernel) == name


def test_steps_of_real_loops(tmp_path: Path, weightless: str) -> None:
    """A device lane beside the host's: eight steps of each batch, each on the device while it is in `forward`."""
    runs = record(tmp_path, weightless, "steps", "--batch", "1,3", "--context", "8")
    assert sorted(runs) == sorted(
        f"stage7-steps-{batch}-{loop}-{graphs}"
        for batch in (1, 3)
        for loop in ("plain", "overlap")
        for graphs in ("eager", "graphs")
    )
    for name, events in runs.items():
        batch, device = int(name.split("-")[2]), [event for event in events if event.track == "device"]
        assert {event.name for event in device} == {"decode"}
        assert {event.args["requests"] for event in device} == {batch}
        assert {event.track for event in events} == {"scheduler", "engine", "device"}
        if "plain" in name:
            host = {e.args["step"]: (e.ts, e.ts + (e.duration or 0)) for e in events if e.name == "forward"}
            assert len(device) == len(host) == 8
            for event in device:
                start, end = host[event.args["step"]]
                assert start <= event.ts <= event.ts + (event.duration or 0) <= end + 1  # the file rounds
    said = provenance(tmp_path / "stage7-steps-3-plain-eager.json")
    assert said["what"] == "decode steps of 3 requests; the device's times are by CUDA events"
    assert said["command"] == "python -m minisgl.benchmark record-trace steps --tp 1", (
        "where the files went is nobody's"
    )
    assert {"model", "dtype", "machine", "date", "versions", "commit"} < said.keys()


def test_launches_of_a_real_step(tmp_path: Path, weightless: str) -> None:
    """Two layers of four products and a head: nine kernels, each after its launch, all in the step's forward."""
    runs = record(tmp_path, weightless, "launches", "--batch", "3", "--context", "8")
    assert sorted(runs) == ["stage7-launches-3-eager", "stage7-launches-3-graphs"]
    for events in runs.values():
        (forward,) = (event for event in events if event.name == "forward")
        launches = {e.args["launch"]: e for e in events if e.track == "launches"}
        kernels = [event for event in events if event.track == "stream 7"]
        assert [kernel.name for kernel in kernels] == ["mm_kernel"] * 9
        assert len(launches) == 9
        for kernel in kernels:
            launch = launches[kernel.args["launch"]]
            assert forward.ts <= launch.ts < kernel.ts < forward.ts + (forward.duration or 0) + US
        assert {event.track for event in events} == {"scheduler", "engine", "launches", "stream 7"}


def rank_step(rank: int, num_layers: int, names: tuple[str, ...] = ("a", "b"), step: int = 5) -> list[Event]:
    """A step of one rank: two kernels of 3 µs, 1 apart, then a meeting of 4 µs; so for the embedding, twice a layer,
    and for the head, after whose meeting is one kernel more. Everything is launched 50 µs before it begins."""

    def event(name: str, track: str, ts: int, duration: int, **args: Any) -> Event:
        return Event(name, "X", ts * US, track, None, args, duration * US, role="rank", rank=rank)

    at, kernels = 100, []
    for meeting in range(2 * num_layers + 2):
        for name in names:
            kernels.append((name, at, 3))
            at += 4
        kernels.append(("ncclDevKernel_AllReduce_Sum" if meeting % 2 else "_one_shot", at, 4))
        at += 5
    kernels.append(("sample", at, 2))
    plan = {"step": step, "phase": "decode", "requests": 3, "tokens": 3}
    events = [event("schedule", "scheduler", 0, 40, **plan), event("forward", "engine", 45, at - 50, step=step)]
    for number, (name, start, duration) in enumerate(kernels):
        stream = 11 if "nccl" in name else 7
        events.append(event("cudaLaunchKernel", "launches", start - 50, 1, launch=number))
        events.append(event(name, f"stream {stream}", start, duration, launch=number))
    return events


def test_our_own_sum_is_known_by_its_name() -> None:
    source = (Path(minisgl.__file__).parent / "kernel" / "triton_all_reduce.py").read_text()
    assert "@triton.jit\ndef _one_shot(" in source, "the kernel has another name: trace_cut must know it"


def test_layers_are_what_lies_between_the_meetings() -> None:
    num_layers = 3
    spans = layer_spans([event for rank in (1, 0) for event in rank_step(rank, num_layers)], num_layers)
    for rank in (0, 1):
        own = [span for span in spans if span.rank == rank]
        assert [span.name for span in own] == ["compute", "all-reduce"] * 7 + ["compute", "all-gather", "compute"]
        places = [(span.args["part"], span.args.get("layer")) for span in own]
        expected = [("embedding", None)] * 2
        for layer in range(num_layers):
            expected += [("attention", layer)] * 2 + [("mlp", layer)] * 2
        assert places == [*expected, *[("head", None)] * 3]
        assert [(s.ts // US, s.duration // US) for s in own[2:4]] == [(113, 7), (121, 4)]  # type: ignore[operator]
        assert own[3].args["kernel"] == "ncclDevKernel_AllReduce_Sum"
        assert own[5].args["kernel"] == "_one_shot"
        assert own[2].args == {"part": "attention", "layer": 0, "kernels": 2, "busy_ns": 6 * US}
        assert {span.track for span in own} == {"device"}


def test_a_rank_alone_computes_in_one_piece() -> None:
    kernels = [e for e in rank_step(0, 2) if e.name in ("a", "b", "sample")]
    (span,) = layer_spans(kernels, 2)
    assert (span.name, span.args["part"], span.args["kernels"]) == ("compute", "all", 13)


def test_kernels_that_overlap_are_busy_once() -> None:
    kernels = [e for e in rank_step(0, 2) if e.name in ("a", "b", "sample")]
    early = [replace(e, ts=e.ts - 2 * US, duration=5 * US) if e.name == "b" else e for e in kernels]
    (span,), (plain,) = layer_spans(early, 2), layer_spans(kernels, 2)
    assert plain.args["busy_ns"] == (6 * 6 + 2) * US
    assert span.args["busy_ns"] == (6 * 7 + 2) * US, "3 µs, the pause of 1, and 3"


def test_too_few_meetings_are_an_error() -> None:
    with pytest.raises(ValueError, match="rank 0 met the others 6 times in 3 layers"):
        layer_spans(rank_step(0, 2), 3)


def test_a_step_in_detail_is_that_step_alone() -> None:
    """Kernels that were launched before its forward, such as copies of indices, are not its own."""
    events = rank_step(0, 1) + rank_step(1, 1)
    other = [Event("Memcpy HtoD", "X", 60 * US, "stream 3", None, {"launch": 99}, US, role="rank")]
    asked = [Event("cudaMemcpyAsync", "X", 30 * US, "launches", None, {"launch": 99}, US, role="rank")]
    found = cut_kernels([*events, *other, *asked], 5)
    assert sorted(map(repr, found)) == sorted(map(repr, events))


def plan(step: int, phase: str, requests: int, tokens: int) -> Event:
    args = {"step": step, "phase": phase, "requests": requests, "tokens": tokens}
    return Event("schedule", "X", step * 10, "scheduler", None, args, 3, role="main")


def test_which_steps_are_kept() -> None:
    plans = [plan(step, "decode", 3, 3) for step in range(1, 11)] + [plan(11, "decode", 2, 2)]
    assert last_steps(plans, 3, 4) == (5, 8)
    prompts = [plan(1, "prefill", 3, 9), plan(4, "prefill", 1, 9), plan(6, "prefill", 1, 8), plan(7, "mixed", 1, 20)]
    assert fullest_prefill(prompts) == 4
    with pytest.raises(ValueError, match="no 11 decode steps of 3 requests in a row: raise --steps"):
        last_steps(plans, 3, 9)
    with pytest.raises(ValueError, match="in a row"):
        last_steps([*plans[:5], plan(6, "mixed", 4, 9), *plans[6:]], 3, 6)


def test_a_cut_has_all_that_went_on_meanwhile(tmp_path: Path) -> None:
    """From the first step's schedule to the last one's end on the device, which is after the next was scheduled."""
    events: list[Event] = []
    for step in range(1, 7):
        events.append(plan(step, "decode", 3, 3))
        args = {"step": step}
        events.append(Event("forward", "X", step * 10 + 3, "engine", None, args, 2, role="main"))
        events.append(Event("decode", "X", step * 10 + 5, "device", None, args, 10, role="main"))
        events.append(Event("pages", "C", step * 10, "counters", None, {"free": 2}, role="main"))
    shown = cut_steps(events, 3, 4)
    assert [(event.name, event.args["step"]) for event in sorted(shown, key=lambda event: event.ts)] == [
        ("decode", 2),
        *[(name, step) for step in (3, 4) for name in ("schedule", "forward", "decode")],
        ("schedule", 5),
        ("forward", 5),
    ]
    path = tmp_path / "new" / "cut.json"
    write(path, shown, {"machine": "1 x GPU"})
    assert read_events(path) == sorted(shown, key=lambda event: (event.ts, -(event.duration or 0)))
    assert provenance(path) == {"machine": "1 x GPU"}


def test_without_a_gpu_it_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["record-trace", "steps", "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: record-trace needs a GPU")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("what", "tp", "words"), [("steps", "2", "leave it out"), ("layers", "1", "give --tp 2")])
def test_the_ranks_it_is_recorded_of(
    weightless: str, what: str, tp: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["record-trace", what, "--model", weightless, "--tp", tp])
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_layers_of_two_ranks_and_of_one(
    tmp_path: Path, weightless: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the ranks themselves: of each run a decode step and the fullest prefill."""
    asked = []

    def profiled(subject: Any, args: Any) -> list[Event]:
        asked.append((subject.config.tp, subject.config.comm, subject.config.cuda_graph_max_bs))
        names = ("a", "b")
        prompts = [e for rank in range(subject.config.tp) for e in rank_step(rank, 2, names, step=4)]
        for event in prompts:
            event.args.update({"phase": "prefill"} if event.name == "schedule" else {})
        steps = [e for n in range(5, 9) for rank in range(subject.config.tp) for e in rank_step(rank, 2, names, n)]
        return [*prompts, *steps]

    monkeypatch.setattr("minisgl.benchmark.record_trace._profiled", profiled)
    runs = record(tmp_path, weightless, "layers", "--tp", "2", "--batch", "1,3")
    assert asked == [(2, "nccl", 3), (1, "auto", 3), (2, "symm", 3)]
    assert sorted(runs) == sorted(
        f"stage6-layers-{name}-{ranks}" for name in ("decode-3", "prefill") for ranks in ("tp1", "tp2-nccl", "tp2-symm")
    )
    decode = runs["stage6-layers-decode-3-tp2-nccl"]
    assert {event.args["step"] for event in decode if event.name in ("schedule", "forward")} == {6}
    assert sum(event.name == "all-reduce" for event in decode) == 2 * 5
    assert {event.track for event in decode} == {"scheduler", "engine", "device"}
