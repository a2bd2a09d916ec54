"""The learner's way, in a checkout of its own: start, check, hint, diff, progress, and --mine of pytest."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from checkout_copy import ROOT, Run

from minisgl.__main__ import COMMANDS
from minisgl.learn import run_tests
from minisgl.learn.commands import COMMANDS as LEARN_COMMANDS
from minisgl.learn.course import Course
from minisgl.learn.run_tests import Job, verdicts_on

pytestmark = pytest.mark.slow

PAGES = 'raise NotImplementedError("exercise 3.1")'
ALLOCATE = """pages = self._stack[self.num_free - count : self.num_free].flip(0)
        if count > self.num_free:
            raise RuntimeError(f"{count} pages wanted")
        self.num_free -= count
        self._is_free[pages] = False
        return pages"""
WRONG = 'raise NotImplementedError("exercise 3.4")'


def test_from_start_to_done(run: Run, checkout: Path) -> None:
    """One after the other: what a learner sees on the way."""
    mine = checkout / "chapters" / "stage3_paged_pool" / "mine.py"
    told = run("minisgl", "check", "3", status=1).stdout
    assert told.count("to do") == 6
    assert told.count("You have not begun: `minisgl start 3` makes the file") == 1
    before = run("minisgl", "check", "3", "--json", status=1)
    rows = [json.loads(line) for line in before.stdout.splitlines()]
    assert [(row["exercise"], row["status"], row["message"]) for row in rows] == [
        (f"3.{i}", "to do", "") for i in range(1, 7)
    ]
    assert before.stderr.count("`minisgl start 3`") == 1
    assert not (mine.parent / ".mine.json").exists(), "a look leaves nothing behind"
    assert "6 exercises" in run("minisgl", "start", "3").stdout
    assert "stays as it is" in run("minisgl", "start", "3", status=2).stderr
    told = run("minisgl", "check", "3", status=1).stdout
    assert told.count("to do") == 6
    assert "0 of 6 done. Next: 3.1 allocate pages" in told

    mine.write_text(mine.read_text().replace(PAGES, ALLOCATE).replace(WRONG, "self.k_cache(layer_id)[out_loc] = v"))
    told = run("minisgl", "check", "3", status=1).stdout
    assert "✓ 3.1  allocate pages" in told
    assert "✗ 3.4  scatter K and V" in told
    assert "tokens 1, 2, 3 go to the slots 6, 0, 3" in told
    assert "1 of 6 done. Next: mend 3.4" in told
    assert "README.md#the-pool" in told

    rows = [json.loads(line) for line in run("minisgl", "check", "3", "--json", status=1).stdout.splitlines()]
    assert [row["exercise"] for row in rows] == [f"3.{i}" for i in range(1, 7)]
    assert [row["status"] for row in rows] == ["done", "to do", "to do", "failed", "to do", "to do"]
    assert all(set(row) == {"exercise", "status", "message"} for row in rows)

    bars = run("minisgl", "progress").stdout
    assert "■··✗··" in bars
    assert "1 of 6 done" in bars
    mine.write_text(mine.read_text().replace("self.num_free -= count", "self.num_free = self.num_free - count"))
    assert "▪··✗··" in run("minisgl", "progress").stdout  # changed since

    done = run("pytest", "tests/exercises", "-k", "stage3", "--mine", "3", "-q", "-p", "no:cacheprovider", status=1)
    assert "3.2 free pages is to do" in done.stdout
    assert "test_tokens_are_scattered_to_their_slots" in done.stdout
    assert "4 passed" in done.stdout  # 3.1's


def test_hints_tell_more_each_time(run: Run, checkout: Path) -> None:
    hints = Course(checkout).find("1.1")[1][0].hints
    shown = [run("minisgl", "hint", "1.1").stdout for _ in range(len(hints) + 1)]
    for i, text in enumerate(shown):
        assert hints[min(i, len(hints) - 1)] in " ".join(text.split())
    assert "minisgl diff 1.1" in shown[-1]


def test_diff_shows_yours_and_the_packages(run: Run, checkout: Path) -> None:
    before = run("minisgl", "diff", "2.1").stdout  # the skeleton's lines: all of it is to do
    run("minisgl", "start", "2")
    told = run("minisgl", "diff", "2.1").stdout
    assert told == before
    assert '-        raise NotImplementedError("exercise 2.1")' in told
    assert "+        self.k_cache(layer_id)[out_loc] = k" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("check", "9"), "there is no chapter '9' with exercises: there are 1, 2"),
        (("check", "3.9"), "there is no exercise '3.9': chapter 3 has 3.1"),
        (("hint", "3"), "which exercise?"),
    ],
)
def test_what_is_not_there_is_said(run: Run, arguments: tuple[str, ...], words: str) -> None:
    assert words in run("minisgl", *arguments, status=2).stderr


def test_the_commands_are_named(run: Run) -> None:
    assert set(COMMANDS.split(", ")) == {*LEARN_COMMANDS, "where"}
    told = run("minisgl", "chekc", "1", status=2)
    assert f"there is no command 'chekc': there are {COMMANDS}" in told.stderr
    assert COMMANDS in run("minisgl", "--help").stdout


def test_a_file_that_is_not_python(run: Run, checkout: Path) -> None:
    mine = checkout / "chapters" / "stage4_radix_cache" / "mine.py"
    mine.write_text("class MyRadixCache(:\n")
    assert f"{mine}, line 1: " in run("minisgl", "check", "4", status=2).stderr
    bars = run("minisgl", "progress").stdout
    assert re.search(rf"^4  .* ✗✗+ +{re.escape(str(mine))}, line 1: ", bars, re.MULTILINE)
    assert "\n8  " in bars, "the chapters after it are shown"


def test_without_the_checkout_the_error_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="clone the repository"):
        Course(tmp_path)


@pytest.mark.parametrize(("made_by_setup", "remedy"), [(True, "dev/setup.py notebooks`"), (False, "'.[dev]'`")])
def test_what_to_install_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_by_setup: bool, remedy: str
) -> None:
    monkeypatch.setattr(run_tests.sys, "prefix", str(tmp_path))
    if made_by_setup:
        (tmp_path / "minisgl-setup.json").touch()
    job = Job("1.1", (), ("tests/no_such_test.py",))
    (tmp_path / "pytest.py").write_text("raise ModuleNotFoundError(\"No module named 'pytest'\")")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(RuntimeError, match="the tests broke down: .*No module named 'pytest'. They need") as caught:
        list(verdicts_on([job], tmp_path))
    assert str(caught.value).endswith(remedy)


@pytest.mark.slow
def test_tests_that_cannot_begin_say_nothing_about_the_code(run: Run, checkout: Path) -> None:
    chapter = Course(checkout).chapter("1")
    shutil.copy(chapter.solution, chapter.mine)
    conftest = checkout / "tests" / "conftest.py"
    keep = conftest.read_text()
    try:
        run("minisgl", "check", "1.1")
        conftest.write_text("import no_torch_here\n")
        told = run("minisgl", "check", "1.1", status=2)
        assert "the tests broke down: ModuleNotFoundError: No module named 'no_torch_here'. They need `" in told.stderr
        assert "mend" not in told.stdout
        conftest.write_text(keep)
        assert "■▪" in run("minisgl", "progress").stdout, "what was done is done"
    finally:
        conftest.write_text(keep)
        chapter.mine.unlink()
