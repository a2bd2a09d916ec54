"""The server's processes: they answer as one LLM does, they end together, and they leave nothing behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from tiny_model import make_tiny_model

from minisgl.core.outputs import Completion
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import read_events
from minisgl.stage5.llm import LLM as Stage5LLM
from minisgl.stage8.child_process import reporting
from minisgl.stage8.launch import ProcessDied, Processes
from minisgl.stage8.llm import LLM
from minisgl.stage8.messages import Reply, Tokenize
from minisgl.stage8.server_config import ServerConfig

PROMPTS = ["The quick brown fox", "Wie geht es dir?"]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 64, "page_size": 4, "max_seq_len": 200, "threads": 1}
QUIET = {"log_level": "warning"}
ASKING = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=True)


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No test leaves a child, a file descriptor or a folder of sockets."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))  # pytest's own folders are too long for sockets
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = open_files()
    yield
    assert eventually(lambda: not list(folder.iterdir())), f"left behind: {list(folder.iterdir())}"
    assert open_files() - before == 0
    folder.rmdir()


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def eventually(what: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def check_logprobs(llm: LLM, expected: list[Completion]) -> None:
    found = llm.generate(PROMPTS, ASKING)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    for answer, other in zip(found, expected, strict=True):
        assert answer.prompt_logprobs
        assert other.prompt_logprobs
        assert answer.prompt_logprobs[0] is None
        rows = [*answer.prompt_logprobs[1:], *(answer.logprobs or [])]
        others = [*other.prompt_logprobs[1:], *(other.logprobs or [])]
        assert len(rows) == len(others) == answer.prompt_tokens - 1 + len(answer.token_ids)
        assert [row.logprob for row in rows if row] == pytest.approx([row.logprob for row in others if row], abs=1e-3)


def check_stop_string(llm: LLM, text: str) -> None:
    """The detokenizer ends the answer, and every rank the work for it."""
    stop = text[len(text) // 2 :][:3]
    llm._send(Tokenize(10**6, greedy(150), text=PROMPTS[0], stop=[stop]))
    replies: list[Reply] = []
    while not replies or not replies[-1].is_terminal:
        replies += llm._receive()
    assert replies[-1].finish_reason == "stop"
    assert "".join(reply.text for reply in replies) == text[: text.index(stop)]
    llm.generate(PROMPTS, greedy(2))  # after which the ranks are in step, or hang
    assert llm.stats()["requests_running"] == 0


def check_like_stage5(folder: Path, victim: str, **options: Any) -> None:
    """From the start of the processes to the death of one of them: a start takes seconds, so it is one test."""
    with Stage5LLM(str(folder), **OPTIONS) as alone:
        expected = alone.generate(PROMPTS, greedy(16))
        with_logprobs = alone.generate(PROMPTS, ASKING)
        baseline = alone.stats()
    llm = LLM(str(folder), **OPTIONS, **QUIET, **options)
    pids = list(llm.processes.pids.values())
    try:
        assert llm.generate(PROMPTS, greedy(16)) == expected
        check_logprobs(llm, with_logprobs)
        assert baseline.items() <= llm.stats().items()
        check_stop_string(llm, expected[0].text)
        with pytest.raises(ValueError, match="max_tokens"):
            llm.generate(["fine", "too long"], [greedy(4), greedy(10_000)])

        chunks = llm.stream(PROMPTS[0], greedy(150))
        assert [next(chunks).token_ids[0] for _ in range(3)] == expected[0].token_ids[:3]
        chunks.close()
        stats = llm.stats()
        assert stats["requests_running"] == stats["requests_waiting"] == 0
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
        assert stats["rows_free"] == baseline["rows_free"]
        assert [c.token_ids for c in llm.generate(PROMPTS, greedy(16))] == [c.token_ids for c in expected]

        chunks = llm.stream(PROMPTS[0], greedy(150))
        next(chunks)
        os.kill(llm.processes.pids[victim], signal.SIGKILL)
        with pytest.raises(ProcessDied, match=f"{victim} process was killed by SIGKILL"):
            list(chunks)
        with pytest.raises(ProcessDied, match="make a new one"):
            llm.generate(PROMPTS, greedy(4))
    finally:
        llm.close()
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_three_processes_from_start_to_the_death_of_one(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    check_like_stage5(tiny_folder, "detokenizer 0", trace=str(file))
    events = [event for event in read_events(file) if event.uid == 0 and event.track == "messages"]
    journey = [(event.role, event.name) for event in events]
    assert list(dict.fromkeys(journey)) == [
        ("main", "Tokenize"),
        ("detokenizer", "Generate"),  # of the role of the tokenizer, in the same process
        ("scheduler", "Step"),
        ("detokenizer", "Replies"),
    ]
    assert journey.count(("scheduler", "Step")) == 16
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_and_two_tokenizers_from_start_to_the_death_of_one(tiny_folder: Path) -> None:
    check_like_stage5(tiny_folder, "scheduler 1", tp=2, num_tokenizer=2)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_parent_that_is_killed_takes_its_children_along(tiny_folder: Path) -> None:
    """Its folder of sockets is removed by the children. Also: idle processes sleep, and Ctrl-C and SIGTERM, which
    reach whole groups of processes, end none of them."""
    code = f"""if True:
        import json
        from minisgl.stage8.llm import LLM
        llm = LLM({str(tiny_folder)!r}, **{OPTIONS!r}, **{QUIET!r})
        print(json.dumps(llm.processes.pids), flush=True)
        for line in iter(input, None):
            first = llm.stats()["scheduler_wakeups"]
            print(llm.stats()["scheduler_wakeups"] - first, flush=True)
    """
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": tempfile.gettempdir()}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert parent.stdin is not None
        assert parent.stdout is not None
        pids = msgspec.json.decode(parent.stdout.readline(), type=dict[str, int])
        assert sorted(pids) == ["detokenizer 0", "scheduler 0"]
        for pid in pids.values():
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        assert int(parent.stdout.readline()) == 1  # from one heartbeat to the next: not once more
        parent.kill()
        parent.wait(30)
        assert eventually(lambda: not any(is_running(pid) for pid in pids.values()))
    finally:
        parent.kill()
        parent.wait(30)
        for pipe in (parent.stdin, parent.stdout):
            if pipe:
                pipe.close()


@pytest.mark.timeout(60)
def test_a_child_that_refuses_to_start_ends_all_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text("{}")
    processes = Processes(ServerConfig(model=str(folder), **OPTIONS, **QUIET), folder)
    with pytest.raises(ValueError, match="tokenizer.json") as caught:
        processes.start()
    assert len(str(caught.value).splitlines()) == 1
    assert not processes.pids
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("victim", ["scheduler 0", "detokenizer 0"])
def test_a_child_killed_during_the_start_ends_all(victim: str, tiny_folder: Path) -> None:
    processes = Processes(ServerConfig(model=str(tiny_folder), **OPTIONS, **QUIET), tiny_folder)
    with ThreadPoolExecutor() as pool:
        start = pool.submit(processes.start)
        assert eventually(lambda: len(processes.pids) == 2)
        pids = processes.pids
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(ProcessDied, match=f"the {victim} process was killed by SIGKILL"):
            start.result(30)
    assert not any(is_running(pid) for pid in pids.values())


@pytest.mark.timeout(60)
def test_a_start_can_be_called_off_from_another_thread(tiny_folder: Path) -> None:
    processes = Processes(ServerConfig(model=str(tiny_folder), **OPTIONS, **QUIET), tiny_folder)
    with ThreadPoolExecutor() as pool:
        start = pool.submit(processes.start)
        assert eventually(lambda: len(processes.pids) == 2)
        pids = processes.pids
        processes.stop()
        with pytest.raises(ProcessDied, match="stopped while it started"):
            start.result(30)
    assert not any(is_running(pid) for pid in pids.values())


def test_a_parent_that_may_open_no_more_files_hears_its_children() -> None:
    """Clients can have all its descriptors: they must not take its processes from it."""

    class Reporting(NamedTuple):
        reports: int

        def fileno(self) -> int:
            return self.reports

    reports, report = os.pipe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    child: Any = Reporting(reports)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        assert reporting([child], 0) == []
        os.write(report, b"x")
        assert reporting([child]) == [child]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(reports)
        os.close(report)


def test_neither_the_parent_nor_the_text_processes_load_torch() -> None:
    code = """if True:
        import sys
        import minisgl.stage8.llm, minisgl.stage8.launch, minisgl.stage8.text_process
        print([name for name in ("torch", "transformers", "fastapi", "numpy") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
