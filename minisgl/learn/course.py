"""The course as files: chapters, their exercises, where a learner's code lies. Knows nothing of running any."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from minisgl.learn.registry import PLACES

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mistake:
    """A failure that matches the regular expression most likely has this cause."""

    match: str
    words: str


@dataclass(frozen=True)
class Exercise:
    """One table of a chapter's exercises.toml, and the methods of the package that bear its number."""

    number: str
    title: str
    level: int  # 1 to 3
    minutes: int
    hints: tuple[str, ...]  # each says more than the one before
    reread: str  # file and section, from the chapter's folder
    tests: tuple[str, ...]  # pytest's node ids, the most telling first
    mistakes: tuple[Mistake, ...]
    places: tuple[str, ...]  # "module:Class.method"
    given: dict[str, list[str]]  # by class: lines on what its method may use beside its arguments
    runs: str = ""  # when the method is called on its stage, if not always
    stages: tuple[int, ...] = ()  # those that call it, if not all from its own on

    def runs_on(self, stage: int) -> bool:
        return stage in self.stages if self.stages else stage >= int(self.number.split(".")[0])


@dataclass(frozen=True)
class Chapter:
    number: int
    folder: Path

    @property
    def title(self) -> str:
        return self.folder.name.split("_", 1)[1].replace("_", " ")

    @property
    def skeleton(self) -> Path:
        return self.folder / "exercise.py"

    @property
    def mine(self) -> Path:
        return self.folder / "mine.py"

    @property
    def code(self) -> Path:
        """The learner's, or what `minisgl start` would make of it: all of that is to do."""
        return self.mine if self.mine.exists() else self.skeleton

    @property
    def solution(self) -> Path:
        return self.folder.parents[1] / "solutions" / f"{self.folder.name}.py"

    @cached_property
    def exercises(self) -> list[Exercise]:
        tables: dict[str, dict[str, Any]] = read_toml(self.folder / "exercises.toml")
        return [_exercise(number, table) for number, table in tables.items()]


class Course:
    def __init__(self, root: Path = PACKAGE_ROOT) -> None:
        """root: a checkout. Raises ValueError for what is only the installed package."""
        missing = [name for name in ("chapters", "tests/exercises") if not (root / name).is_dir()]
        if missing:
            raise ValueError(
                f"the course is not in {root} ({', '.join(missing)} missing): clone the repository, and install "
                "it there with `pip install -e '.[dev]'`"
            )
        self.root = root
        folders = (root / "chapters").glob("stage*/exercises.toml")
        chapters = [Chapter(int(path.parent.name.split("_")[0][5:]), path.parent) for path in folders]
        self.chapters = sorted(chapters, key=lambda chapter: chapter.number)

    def chapter(self, number: str) -> Chapter:
        for chapter in self.chapters:
            if str(chapter.number) == number:
                return chapter
        if "." in number:
            raise ValueError(f"{number!r:.80} is one exercise, and this takes whole stages: {number.split('.')[0]:.80}")
        known = ", ".join(str(chapter.number) for chapter in self.chapters)
        raise ValueError(f"there is no chapter {number!r:.80} with exercises: there are {known}")

    def find(self, which: str) -> tuple[Chapter, list[Exercise]]:
        """ "3" is a chapter and all its exercises, "3.1" is one of them. Raises ValueError when there is none."""
        chapter = self.chapter(which.split(".")[0])
        found = [exercise for exercise in chapter.exercises if which in (str(chapter.number), exercise.number)]
        if not found:
            known = ", ".join(exercise.number for exercise in chapter.exercises)
            raise ValueError(f"there is no exercise {which!r:.80}: chapter {chapter.number} has {known}")
        return chapter, found


def read_toml(path: Path) -> dict[str, Any]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    with path.open("rb") as file:
        return toml.load(file)


def _exercise(number: str, table: dict[str, Any]) -> Exercise:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    fields["mistakes"] = tuple(Mistake(**mistake) for mistake in table["mistakes"])
    return Exercise(number=number, places=PLACES[number], **fields)
