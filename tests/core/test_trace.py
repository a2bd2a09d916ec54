"""The recorder costs nothing when off, loses nothing when on, and its merged file is what Perfetto reads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from minisgl.core.trace import Event, Tracer, merge, read_events

REQUIRED = {  # Google's "Trace Event Format", by phase; beside name, ph, ts, pid, tid
    "X": {"dur": float, "args": dict},
    "i": {"s": str, "args": dict},
    "b": {"cat": str, "id": int, "args": dict},
    "e": {"cat": str, "id": int, "args": dict},
    "C": {"args": dict},
    "s": {"cat": str, "id": int},
    "f": {"cat": str, "id": int, "bp": str},
    "M": {"args": dict},
}


def record_all(tracer: Tracer, uid: int = 0) -> None:
    """Every kind of event once, the uid in those that take one."""
    tracer.begin("queued", uid, prompt_tokens=7)
    with tracer.span("step", track="scheduler", batch=2):
        with tracer.span("schedule", track="scheduler", uid=uid):
            tracer.flow_start(3, track="scheduler")
        tracer.instant("evict", track="cache", uid=uid, pages=[1, 2])
    tracer.end("queued", uid)
    start = tracer.now()
    tracer.flow_end(3, track="device")
    tracer.complete("forward", start, tracer.now() + 1000, track="device", tokens=2)
    tracer.counter("pages", free=3, used=5.5)


def chrome(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def test_off_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracer = Tracer(None)
    assert not tracer.enabled
    monkeypatch.setattr(tracer, "now", lambda: 1 / 0)  # whoever is off does not even look at the clock
    with tracer.span("step", track="scheduler", n=1):
        tracer.instant("evict", track="cache", n=1)
    tracer.begin("queued", 1)
    tracer.end("queued", 1)
    tracer.complete("forward", 1, 2, track="device")
    tracer.counter("pages", free=1)
    tracer.flow_start(1, track="scheduler")
    tracer.flow_end(1, track="device")
    tracer.close()
    assert list(tmp_path.iterdir()) == []


def test_events_come_back_from_the_part_and_from_the_merged_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracer = Tracer(path, "scheduler", 1)
    record_all(tracer, uid=0)  # 0 is a request like any other
    tracer.close()
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json.scheduler1.jsonl"]
    events = read_events(path)
    merge(path)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    assert read_events(path) == events
    assert Counter(event.phase for event in events) == Counter("XXXibeCsf")
    assert {(event.role, event.rank) for event in events} == {("scheduler", 1)}
    by_name = {event.name: event for event in events}
    evict = by_name["evict"]
    assert evict == Event("evict", "i", evict.ts, "cache", 0, {"pages": [1, 2]}, role="scheduler", rank=1)
    assert by_name["pages"].args == {"free": 3, "used": 5.5}
    assert by_name["step"].uid is None
    assert by_name["schedule"].uid == 0
    assert [event.ts for event in events] == sorted(event.ts for event in events)


def test_spans_of_a_track_nest(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracer = Tracer(path)
    for step in range(20):
        with tracer.span("step", track="scheduler", step=step), tracer.span("schedule", track="scheduler"):
            tracer.instant("admit", track="scheduler")
    with pytest.raises(KeyError), tracer.span("failed", track="scheduler"):
        raise KeyError("a span ends also when its body raises")
    tracer.close()
    merge(path)
    spans = [event for event in read_events(path) if event.phase == "X"]
    assert len(spans) == 41
    open_ends: list[int] = []
    for span in spans:
        assert span.duration is not None
        assert span.duration >= 0
        while open_ends and open_ends[-1] <= span.ts:
            open_ends.pop()
        assert not open_ends or span.ts + span.duration <= open_ends[-1]
        open_ends.append(span.ts + span.duration)


def test_merge_of_three_processes_one_of_them_killed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for role, rank in (("main", 0), ("scheduler", 0), ("scheduler", 1)):
        tracer = Tracer(path, role, rank)
        record_all(tracer, uid=5)
        tracer.close()
    cut = tmp_path / "trace.json.scheduler1.jsonl"
    cut.write_bytes(cut.read_bytes()[:-10])
    events = read_events(path)
    assert len(events) == 9 + 9 + 8
    merge(path)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    assert read_events(path) == events
    items = chrome(path)
    names = {item["args"]["name"] for item in items if item["name"] == "process_name"}
    assert names == {"main 0", "scheduler 0", "scheduler 1"}
    for phase in "bs":  # the same request or step of another process is another arrow
        assert len({item["id"] for item in items if item["ph"] == phase}) == 3


def test_merged_file_has_what_the_format_requires(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracer = Tracer(path)
    record_all(tracer, uid=1)
    tracer.close()
    merge(path)
    items = chrome(path)
    assert {item["ph"] for item in items} == set(REQUIRED)
    named = {(item["pid"], item["tid"]) for item in items if item["name"] == "thread_name"}
    for item in items:
        fields = {"name": str, "ph": str, "ts": (int, float), "pid": int, "tid": int, **REQUIRED[item["ph"]]}
        for field, kind in fields.items():
            assert isinstance(item[field], kind), f"{field} of {item}"
        assert item["ph"] == "M" or (item["pid"], item["tid"]) in named
        if item["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in item["args"].values())
    matched = {phase: [(i["cat"], i["id"], i["name"]) for i in items if i["ph"] == phase] for phase in "besf"}
    assert matched["b"] == matched["e"]
    assert matched["s"] == matched["f"]
    span = next(item for item in items if item["name"] == "forward")
    flow_end = next(item for item in items if item["ph"] == "f")
    assert span["ts"] <= flow_end["ts"] <= span["ts"] + span["dur"]
    assert (span["pid"], span["tid"]) == (flow_end["pid"], flow_end["tid"])


def test_two_threads_record_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracer = Tracer(path)

    def work(track: str) -> None:
        for number in range(2000):
            tracer.instant("tick", track=track, number=number)

    threads = [threading.Thread(target=work, args=(track,)) for track in ("scheduler", "device")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    tracer.close()
    events = read_events(path)
    for track in ("scheduler", "device"):
        assert [event.args["number"] for event in events if event.track == track] == list(range(2000))


def test_a_process_that_exits_without_close_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    code = "import sys; from minisgl.core.trace import Tracer; t = Tracer(sys.argv[1], 'tokenizer')"
    code += "; t.instant('ready', track='messages'); raise SystemExit(3)"
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert done.returncode == 3
    assert [(event.name, event.role) for event in read_events(path)] == [("ready", "tokenizer")]


def test_after_close_nothing_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    tracer = Tracer(path)
    tracer.close()
    tracer.close()
    record_all(tracer)
    assert read_events(path) == []


def test_the_parent_clears_what_an_earlier_run_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    other = tmp_path / "trace.json.old"
    other.write_text("kept")
    for role in ("scheduler", "main"):
        tracer = Tracer(path, role)
        record_all(tracer)
        tracer.close()
    assert {event.role for event in read_events(path)} == {"main"}
    assert other.read_text() == "kept"


def test_merge_without_parts_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("an earlier trace")
    merge(path)
    assert path.read_text() == "an earlier trace"


def test_values_that_json_lacks_are_shown_as_text(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "trace.json")
    tracer.instant("odd", track="x", where=Path("a/b"))
    tracer.close()
    assert read_events(tmp_path / "trace.json")[0].args == {"where": "a/b"}


@pytest.mark.parametrize(("role", "rank"), [("Main", 0), ("a/b", 0), ("rank1", 0), ("", 0), ("main", -1)])
def test_role_and_rank_must_fit_a_file_name(tmp_path: Path, role: str, rank: int) -> None:
    with pytest.raises(ValueError, match="role must be"):
        Tracer(tmp_path / "trace.json", role, rank)


@pytest.mark.parametrize("name", ["missing/trace.json", "."])
def test_a_path_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"--trace .* cannot be written"):
        Tracer(tmp_path / name)


def test_reading_what_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(ValueError, match="no trace at"):
        read_events(path)
    path.write_text('{"traceEvents": [{"ph": "X"}]}')
    with pytest.raises(ValueError, match="is no trace of minisgl"):
        read_events(path)
    part = tmp_path / "trace.json.main0.jsonl"
    part.write_text("{}\n")
    with pytest.raises(ValueError, match=r"line 1 of .*main0"):
        read_events(path)
