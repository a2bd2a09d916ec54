"""`check`: is the learner's code right? In words, and with the one thing to do next. Knows nothing of command lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minisgl.learn.answers import Answer, Answers
from minisgl.learn.course import Chapter, Course, Exercise, Mistake
from minisgl.learn.memory import remember
from minisgl.learn.run_tests import SECONDS_A_TEST, Job, Verdict, verdicts_on

Status = Literal["done", "to do", "failed"]

CHECKPOINT = "#checkpoint-your-code-serves"  # the section of every chapter

COMMON_MISTAKES = (
    Mistake("NotImplementedError", "a `raise NotImplementedError` is still in the way"),
    Mistake(
        "RecursionError", "the method calls itself, perhaps by way of the package's class, whose place it has taken"
    ),
    Mistake("Timeout", "it does not come to an end: which loop waits for something that never changes?"),
    Mistake("ImportError|ModuleNotFoundError|NameError", "a name is used that mine.py does not import or define"),
    Mistake("inplace update to inference tensor|modified by an inplace", "it writes to a tensor that is not its own"),
)


@dataclass(frozen=True)
class Result:
    exercise: Exercise
    status: Status
    message: str = ""  # what is wrong, in words
    likely: str = ""  # the mistake that this usually is
    test: str = ""  # the one that failed
    where: str = ""  # "mine.py, line 12"
    facts: str = ""  # of what is done


def check(
    course: Course, chapter: Chapter, exercises: Sequence[Exercise], file: Path | None = None
) -> Iterator[Result]:
    """One result an exercise, in their order, each as soon as it is known. file: the code; the learner's if None, who
    may not have begun. Raises ValueError when there is no such file or it is not Python."""
    answers = Answers(file or chapter.code)
    found = {exercise.number: answers.of(exercise) for exercise in exercises}
    helpers = tuple(answers.helpers(exercises))
    jobs = [
        Job(number, (*answer.methods, *helpers), answer.exercise.tests)
        for number, answer in found.items()
        if answer.status == "written"
    ]
    verdicts = verdicts_on(jobs, course.root) if jobs else iter(())
    for answer in found.values():
        yield _result(answer, answers, next(verdicts) if answer.status == "written" else None)


def _result(answer: Answer, answers: Answers, verdict: Verdict | None) -> Result:
    exercise = answer.exercise
    if verdict is None:
        return Result(exercise, "to do" if answer.status == "to do" else "failed", answer.message)
    if not verdict.failed and not verdict.calls:
        return Result(exercise, "failed", "its tests pass, and never called your method: they say nothing about it")
    if not verdict.failed:
        return Result(exercise, "done", facts=f"{verdict.passed} tests, {verdict.calls:,} calls")
    return Result(
        exercise,
        "failed",
        told(verdict.error),
        likely_mistake(exercise, verdict.error),
        verdict.failed,
        f"{answers.file.name}, line {verdict.line}" if verdict.line else "",
    )


def told(error: str) -> str:
    """An exception in its own words: without pytest's dissection of the assert, if the test has words itself."""
    if "Timeout" in error:
        return f"the test was ended after {SECONDS_A_TEST} seconds: it did not end by itself"
    text = error.strip()
    lines = text.removeprefix("AssertionError: ").splitlines()
    words = lines[: next((i for i, line in enumerate(lines) if i and line.startswith("assert ")), len(lines))]
    return "\n".join(words[:6])


def likely_mistake(exercise: Exercise, error: str) -> str:
    for mistake in (*exercise.mistakes, *COMMON_MISTAKES):
        if re.search(mistake.match, error, re.DOTALL):
            return mistake.words
    return ""


def show(which: str, course: Course | None = None) -> bool:
    """Check and print, for people. which: "3" or "3.1". Returns whether all of it is done."""
    course = course or Course()
    chapter, exercises = course.find(which)
    print(f"Stage {chapter.number} · {chapter.title} · {_relative(chapter.mine, course)}\n", flush=True)
    results = []
    for result in check(course, chapter, exercises):
        results.append(result)
        print(lines(result), flush=True)
    if chapter.mine.exists():
        remember(chapter, results)
    print("\n" + summary(course, chapter, results), flush=True)
    return all(result.status == "done" for result in results)


def lines(result: Result) -> str:
    mark = {"done": "✓", "to do": "·", "failed": "✗"}[result.status]
    exercise = result.exercise
    after = f"  {result.facts or (result.message if result.status == 'to do' else '')}"
    first = f"  {mark} {exercise.number}  {exercise.title:<34} {result.status:<6}{after}".rstrip()
    if result.status != "failed":
        return first
    more = [result.message]
    more += [f"Likely: {result.likely}"] if result.likely else []
    more += [f"Where:  {result.where}"] if result.where else []
    body = [textwrap.fill(line, 100, subsequent_indent=" " * 8) for text in more for line in text.splitlines()]
    return first + "\n" + textwrap.indent("\n".join(body), "         ")


def summary(course: Course, chapter: Chapter, results: Sequence[Result]) -> str:
    """How many are done, and the one next thing."""
    done = sum(result.status == "done" for result in results)
    text = f"{done} of {len(results)} done."
    failed = [result for result in results if result.status == "failed"]
    to_do = [result.exercise for result in results if result.status == "to do"]
    if not chapter.mine.exists():
        text += f" {not_begun(chapter)}"
    elif failed:
        exercise = failed[0].exercise
        text += f" Next: mend {exercise.number}. To reread: {_reread(course, chapter, exercise)}"
        text += f" · a hint: `minisgl hint {exercise.number}`"
        if failed[0].test:
            text += f"\nIts test alone, with your code: pytest '{failed[0].test}' --mine {exercise.number}"
    elif to_do:
        exercise = to_do[0]
        text += f" Next: {exercise.number} {exercise.title} ({exercise.minutes} minutes)."
        text += f" To read: {_reread(course, chapter, exercise)}"
    elif len(results) == len(chapter.exercises):
        number = chapter.number
        text += (
            f" Now let it serve: python -m minisgl.stage{number} --mine {number} --prompt 'The capital of France is'"
            f"\nA run that calls all of it: {_relative(chapter.folder, course)}/README.md{CHECKPOINT}"
        )
    else:
        text += f" Next: `minisgl check {chapter.number}` for the whole chapter."
    return text


def not_begun(chapter: Chapter) -> str:
    return f"You have not begun: `minisgl start {chapter.number}` makes the file, with the exercises in it."


def _reread(course: Course, chapter: Chapter, exercise: Exercise) -> str:
    return f"{_relative(chapter.folder, course)}/{exercise.reread}"


def _relative(path: Path, course: Course) -> str:
    return path.relative_to(course.root).as_posix()
