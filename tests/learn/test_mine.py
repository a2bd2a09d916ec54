"""`--mine`: solutions in the learner's place are called on their own stage and on the server, children included."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import httpx
import pytest
from checkout_copy import Run
from server_process import SMALL, running

from minisgl.learn.course import Chapter, Course
from minisgl.learn.serving import chosen

# Enough to call everything: tokens are drawn and filtered; prompts share a beginning, differ, and fill the pool.
DRAW = ("--temperature", "0.8", "--top-k", "9", "--top-p", "0.9", "--max-tokens", "4", "--ignore-eos")
PROMPTS = ("a dog sat here and there", "a dog ran off at once", "something else, long enough to need other pages")
FLAGS = {4: ("--page-size", "4", "--num-pages", "16"), 6: ("--tp", "2")}
ON_A_GPU = {"7.4", "7.5"}  # there are no graphs on a CPU: the exercises' own tests replay some
OVER_HTTP = {"8.3", "8.4", "8.5"}  # a command line has no stop strings, and nobody who goes away


@pytest.fixture(scope="module", autouse=True)
def solved(checkout: Path) -> None:
    for chapter in Course(checkout).chapters:
        shutil.copy(chapter.solution, chapter.mine)


def calls(stderr: str) -> dict[str, int]:
    line = re.search(r"calls of your code: (.*)\]", stderr)
    assert line, stderr
    return {number: int(count.replace(",", "")) for number, count in (item.split(" ") for item in line[1].split(" · "))}


def prompts(*texts: str) -> list[str]:
    return [part for text in texts for part in ("--prompt", text)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [chapter.number for chapter in Course().chapters])
def test_solutions_are_called_on_their_stage(run: Run, checkout: Path, tiny: Path, number: int) -> None:
    stage, mine = f"minisgl.stage{number}", ("--mine", str(number))
    done = run(
        stage, "--model", str(tiny), *mine, *DRAW, *FLAGS.get(number, ()), *prompts(*PROMPTS), "--output", "json"
    )
    found = calls(done.stderr)
    assert set(found) == {exercise.number for exercise in Course(checkout).chapter(str(number)).exercises}
    assert {exercise for exercise, count in found.items() if not count} <= ON_A_GPU | OVER_HTTP, found
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == len(PROMPTS)


@pytest.mark.slow
def test_solutions_are_called_on_the_server(run: Run, checkout: Path, tiny: Path) -> None:
    pool = ("--page-size", "4", "--max-running-requests", "1", "--memory-ratio", "0.9", "--tp", "2")
    done = run("minisgl.stage8", "--model", str(tiny), "--mine", "all", *DRAW, *pool, *prompts(*PROMPTS))
    found = calls(done.stderr)
    wanted = {e.number for chapter in Course(checkout).chapters for e in chapter.exercises if e.runs_on(8)}
    assert all(found[number] for number in wanted - {"4.5"} - ON_A_GPU - OVER_HTTP), found
    assert not found["1.5"], "the server has its own loop"


@pytest.mark.slow
def test_solutions_are_called_over_http(
    checkout: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)  # its package is what `-m` finds first
    body = {"prompt": "a dog sat", "max_tokens": 400, "ignore_eos": True, "stop": ["never said"], "stream": True}
    with running(tmp_path, *SMALL, "--model", str(tiny), "--mine", "8", "--drain-timeout", "10") as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            assert next(response.iter_lines()).startswith("data: ")  # and no more of it is wanted: an abort
        assert server.end() == 0, server.log
    found = calls(server.log)
    assert all(found[number] for number in OVER_HTTP), found


@pytest.mark.slow
def test_a_run_that_calls_nothing_is_an_error(run: Run, checkout: Path, tiny: Path) -> None:
    mine = Course(checkout).chapter("1").mine
    keep = mine.read_text()
    lines = Course(checkout).chapter("1").skeleton.read_text()
    solution = re.search(r"    # 1.4 .*?(?=\n\n\nclass )", keep, re.DOTALL)
    assert solution
    stub = re.search(r"    # 1.4 .*?(?=\n\n\nclass )", lines, re.DOTALL)
    assert stub
    mine.write_text(lines.replace(stub[0], solution[0]))
    try:
        done = run(
            "minisgl.stage1", "--model", str(tiny), "--mine", "1", "--prompt", "a", "--max-tokens", "2", status=1
        )
    finally:
        mine.write_text(keep)
    assert "[your code: 1.4 top-k and top-p]" in done.stderr
    assert "1.4 top-k and top-p was not called: it is called when --temperature is above 0" in done.stderr
    assert "error: none of your code was called" in done.stderr


@pytest.mark.slow
def test_what_cannot_be_installed_is_said_before_anything_runs(run: Run) -> None:
    done = run("minisgl.stage3", "--mine", "9", "--prompt", "a", status=2)
    assert "there is no chapter '9'" in done.stderr
    assert not done.stdout


def test_all_is_every_chapter_that_was_begun(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "tests" / "exercises").mkdir(parents=True)
    shutil.copytree(checkout / "chapters", tmp_path / "chapters", ignore=shutil.ignore_patterns("mine.py"))
    course = Course(tmp_path)
    with pytest.raises(ValueError, match="no chapter has a mine.py yet: `minisgl start 1`"):
        chosen(course, "all")
    with pytest.raises(ValueError, match="there is no chapters/stage3_paged_pool/mine.py: `minisgl start 3` makes it"):
        chosen(course, "3")
    for number in ("2", "3"):
        shutil.copy(course.chapter(number).skeleton, course.chapter(number).mine)
    with pytest.raises(ValueError, match="nothing is written there yet"):
        chosen(course, "all")
    shutil.copy(checkout / "solutions" / "stage3_paged_pool.py", course.chapter("3").mine)
    methods, exercises = chosen(course, "2, 3")
    assert {exercise.number for exercise in exercises} == {f"3.{i}" for i in range(1, 7)}
    assert {method.file for method in methods} == {str(course.chapter("3").mine)}


@pytest.mark.slow
def test_a_method_that_would_fall_through_is_refused(run: Run, checkout: Path, tiny: Path) -> None:
    chapter: Chapter = Course(checkout).chapter("2")
    keep = chapter.mine.read_text()
    chapter.mine.write_text(keep.replace("def store(", "def stor("))
    try:
        done = run("minisgl.stage2", "--model", str(tiny), "--mine", "2", "--prompt", "a", status=2)
        assert "2.1: MyContiguousCache has no method store (stor is there: is that it?)" in done.stderr
        assert "no method store" in run("minisgl", "check", "2.1", status=1).stdout
    finally:
        chapter.mine.write_text(keep)
