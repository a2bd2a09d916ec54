"""A process that tests learners' methods: jobs on standard input, verdicts on standard output, one a line.

Run by `verdicts_on` and by nobody else. Each job has its methods alone in the package's place, so that one mistake does
not fail the tests of another exercise. Knows nothing of what is an exercise.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minisgl.learn.install import Method, install

SECONDS_A_TEST = 60
REMEDY = "pip install -e '.[dev]'"  # in an environment that dev/setup.py did not make
BROKEN = (3, 4)  # pytest's exit statuses for an internal error, and for what it cannot begin: no verdict on any code
WITHOUT = ("cacheprovider", "unraisableexception")  # pytest's: the second collects garbage for half a second a job


@dataclass(frozen=True)
class Job:
    exercise: str
    methods: tuple[Method, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    exercise: str
    passed: int
    calls: int  # of the methods, by the tests
    failed: str = ""  # the test that failed, or could not be run
    error: str = ""  # what it said: the exception and its message
    line: int = 0  # of the learner's file, where it happened; 0 when it happened elsewhere


def verdicts_on(jobs: Sequence[Job], root: Path) -> Iterator[Verdict]:
    """Run the jobs in a process of their own. Verdicts come as they are made; raises RuntimeError if it breaks down."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "minisgl.learn.run_tests"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path(root)},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([asdict(job) for job in jobs]).encode())
            process.stdin.close()
            count = 0
            for line in process.stdout:
                count += 1
                yield Verdict(**json.loads(line))
            if process.wait() or count < len(jobs):
                errors.seek(0)
                raise RuntimeError(f"the tests broke down: {_reason(errors.read().decode(errors='replace'))}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _reason(said: str) -> str:
    """The line of standard error that says why, and what to install if that is it."""
    lines = [line.removeprefix("E  ").strip() for line in said.strip().splitlines()] or ["without a word"]
    line = next(
        (line for line in reversed(lines) if re.search(r"\w(Error|Exception): |\berror: |^ERROR: ", line)), lines[-1]
    )
    if not re.search("No module named|unrecognized arguments", line):
        return line
    made_by_setup = (Path(sys.prefix) / "minisgl-setup.json").exists()
    return f"{line}. They need `{'python3 dev/setup.py notebooks' if made_by_setup else REMEDY}`"


def _python_path(root: Path) -> str:
    return os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])


class Watcher:
    """A pytest plugin: the first failure, in few words, and how many tests passed."""

    def __init__(self, files: set[str]) -> None:
        self.files = files
        self.passed, self.failed, self.error, self.line = 0, "", "", 0

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._note(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._note(report)
        elif report.when == "call" and report.passed:
            self.passed += 1

    def _note(self, report: Any) -> None:
        if self.failed:
            return
        self.failed = report.nodeid
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(report.longrepr)
        self.error = crash.message if crash else text.strip().splitlines()[-1]
        for file in self.files:
            for number in re.findall(rf"{re.escape(Path(file).name)}:(\d+): ", text):
                self.line = int(number)


def run(job: Job) -> Verdict:
    import pytest  # here: the caller's process need not have it loaded

    watcher = Watcher({method.file for method in job.methods})
    installer = install(job.methods)
    options = ["-x", "-q", f"--timeout={SECONDS_A_TEST}", "-c", "pyproject.toml"]
    options += [option for name in WITHOUT for option in ("-p", f"no:{name}")]
    try:
        status = pytest.main([*options, *job.tests], plugins=[watcher])
    finally:
        installer.remove()
    if status in BROKEN and not watcher.failed:
        sys.exit(int(status))  # its words are on standard error
    calls = installer.calls().get(job.exercise, 0)
    if status and not watcher.failed:
        return Verdict(job.exercise, 0, calls, job.tests[0], f"pytest ended with status {int(status)} and ran nothing")
    return Verdict(job.exercise, watcher.passed, calls, watcher.failed, watcher.error, watcher.line)


def main() -> None:
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what pytest prints is no verdict
    for fields in json.load(sys.stdin):
        methods = tuple(Method(*method) for method in fields["methods"])
        verdict = run(Job(fields["exercise"], methods, tuple(fields["tests"])))
        print(json.dumps(asdict(verdict)), file=report, flush=True)


if __name__ == "__main__":
    main()
