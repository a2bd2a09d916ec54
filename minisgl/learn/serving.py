"""`--mine`: a stage's command line with the learner's code in it, and how often it was called. Knows no stage.

A method that is still a stub is never installed: the package's own stands in for it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from minisgl.learn.answers import Answers
from minisgl.learn.course import Chapter, Course, Exercise
from minisgl.learn.install import VARIABLE, Method, publish, read_calls


def run_with(mine: str, work: Callable[[], int]) -> int:
    """Do the work with the code of the chapters `mine` ("3", "4,5" or "all"). Returns its exit status, or 1 if none of
    that code was called. Raises ValueError, before any work, when there is no such code or it could deceive."""
    course = Course()
    methods, exercises = chosen(course, mine)
    with tempfile.TemporaryDirectory(prefix="minisgl-mine-") as folder:
        installer = publish(methods, folder)
        say("your code: " + " · ".join(f"{e.number} {e.title}" for e in exercises))
        try:
            status = work()
        finally:
            installer.remove()
            del os.environ[VARIABLE]
        calls = read_calls(Path(folder), installer.numbers)
    say("calls of your code: " + " · ".join(f"{e.number} {calls[e.number]:,}" for e in exercises))
    for exercise in exercises:
        if not calls[exercise.number] and (exercise.runs or exercise.stages):
            when = exercise.runs or f"called on stage {' and '.join(map(str, exercise.stages))}"
            say(f"{exercise.number} {exercise.title} was not called: it is {when}")
    if not any(calls.values()):
        print("error: none of your code was called by this run, so it shows nothing about it", file=sys.stderr)
        return status or 1
    return status


def chosen(course: Course, mine: str) -> tuple[list[Method], list[Exercise]]:
    """What is written in these chapters: methods, and the exercises they are of."""
    methods: list[Method] = []
    exercises: list[Exercise] = []
    for chapter in _chapters(course, mine):
        answers = Answers(chapter.mine)
        for exercise in chapter.exercises:
            answer = answers.of(exercise)
            if answer.status == "unusable":
                raise ValueError(f"--mine {mine}: {exercise.number}: {answer.message}")
            if answer.methods:
                methods += answer.methods
                exercises.append(exercise)
        methods += answers.helpers(chapter.exercises)
    if not exercises:
        raise ValueError(f"--mine {mine}: nothing is written there yet: `minisgl check` says what is to do")
    return methods, exercises


def _chapters(course: Course, mine: str) -> list[Chapter]:
    if mine == "all":
        chapters = [chapter for chapter in course.chapters if chapter.mine.exists()]
        if not chapters:
            raise ValueError("--mine all: no chapter has a mine.py yet: `minisgl start 1` makes the first")
        return chapters
    chapters = [course.chapter(number.strip()) for number in mine.split(",")]
    for chapter in chapters:
        if not chapter.mine.exists():
            missing = chapter.mine.relative_to(course.root)
            raise ValueError(f"--mine {mine}: there is no {missing}: `minisgl start {chapter.number}` makes it")
    return chapters


def say(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)
