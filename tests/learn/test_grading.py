"""The teacher's page: its grading of a class works as printed, and its minutes are those of the exercises."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from checkout_copy import ROOT

from minisgl.learn.course import Course

PAGE = ROOT / "chapters" / "for-teachers.md"
CHAPTERS = Course().chapters


@pytest.mark.slow
def test_a_class_is_graded(checkout: Path) -> None:
    chapter = Course(checkout).chapter("3")
    for name, text in (
        ("Ada", chapter.solution.read_text()),
        ("Bob", chapter.skeleton.read_text()),
        ("Eve", "class MyPageAllocator(:\n"),
    ):
        folder = checkout / "handed_in" / name
        folder.mkdir(parents=True)
        (folder / "stage3.py").write_text(text)
    (code,) = [block.text for block in pages.blocks(PAGE) if block.language == "python"]
    run = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    ada, bob, eve = (line.split("\t") for line in run.stdout.splitlines())
    assert ada == ["Ada", "6 of 6", *["done"] * 6]
    assert bob == ["Bob", "0 of 6", *["to do"] * 6]
    assert eve[:2] == ["Eve", "0 of 6"]
    assert "mine.py, line 1" in eve[2]
    assert not chapter.mine.exists()
    shutil.rmtree(checkout / "handed_in")


@pytest.mark.parametrize("page", ["chapters/README.md", "chapters/for-teachers.md"])
def test_minutes_are_those_of_the_exercises(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    linked = {chapter: [row for row in rows if f"({chapter.folder.name}/README.md)" in row] for chapter in CHAPTERS}
    assert sum(map(len, linked.values())) >= 4
    for chapter, (row, *_) in ((chapter, found) for chapter, found in linked.items() if found):
        minutes = sum(exercise.minutes for exercise in chapter.exercises)
        assert f"| {len(chapter.exercises)}, {minutes} minutes |" in row, f"{page}: stage {chapter.number}"
