"""The course fails closed: the generated is current, a skeleton is to do, a solution is done, a mutant is killed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections import deque
from functools import cache
from pathlib import Path

import pytest
import torch
from pages import anchors
from torch import Tensor

from minisgl.learn.answers import Answers
from minisgl.learn.checking import CHECKPOINT, Result, check, likely_mistake
from minisgl.learn.course import Chapter, Course
from minisgl.learn.generate import generated
from minisgl.learn.run_tests import Job, Verdict, verdicts_on
from minisgl.learn.source import Marked, marked_methods

COURSE = Course()
CHAPTERS = [pytest.param(chapter, id=f"stage{chapter.number}") for chapter in COURSE.chapters]
MUTANTS = sorted((COURSE.root / "tests" / "mutants").glob("stage*.py"))
OTHER_ANSWERS = sorted((COURSE.root / "tests" / "other_answers").glob("stage*.py"))
MUTANTS_A_STAGE = 3
LIBRARIES = {"torch", "F", "dist", "np", "heapq"}


def test_what_is_generated_is_current() -> None:
    stale = [path.name for path, text in generated(COURSE).items() if path.read_text("utf-8") != text]
    assert not stale, f"{stale}: run `python -m minisgl.learn generate`"


def test_exercises_have_a_size_that_fits_a_sitting() -> None:
    lines: dict[str, int] = {}
    for method in marked_methods(COURSE.root):
        lines[method.number] = lines.get(method.number, 0) + method.head.count("\n") + method.body.count("\n")
    assert all(2 < count <= 25 for count in lines.values()), f"2 to 25 lines each: {lines}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_skeleton_is_to_do_and_nothing_of_it_done(chapter: Chapter) -> None:
    statuses = [result.status for result in check(COURSE, chapter, chapter.exercises, chapter.skeleton)]
    assert statuses == ["to do"] * len(chapter.exercises)
    assert "@exercise" not in chapter.skeleton.read_text("utf-8")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_what_the_course_says_of_an_exercise(chapter: Chapter) -> None:
    for exercise in chapter.exercises:
        assert exercise.level in (1, 2, 3)
        assert 2 <= len(exercise.hints) <= 3, exercise.number
        assert exercise.mistakes, exercise.number
        for test in exercise.tests:
            assert (COURSE.root / test.split("::")[0]).exists(), test


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_skeleton_names_all_that_the_answer_uses(chapter: Chapter) -> None:
    """Who has it and the chapter need not open the file with the answer."""
    for method in (m for m in marked_methods(COURSE.root) if m.number.split(".")[0] == str(chapter.number)):
        (exercise,) = (e for e in chapter.exercises if e.number == method.number)
        told = " ".join([*exercise.given[method.class_name], method.head, method.doc])
        unsaid = [name for name in used_names(method) if not re.search(rf"\b{name}\b", told)]
        assert not unsaid, f"{method.place} uses {unsaid}: say in exercises.toml what they are"
        module = importlib.import_module(method.module)
        sources = [
            inspect.getsource(base) for base in getattr(module, method.class_name).__mro__[:-1] if _is_ours(base)
        ]
        given = re.findall(r"\bself\.(\w+)", told)
        missing = [name for name in given if not any(re.search(rf"\b{name}\b", text) for text in sources)]
        assert not missing, f"{method.class_name} has no {missing}"


def used_names(method: Marked) -> set[str]:
    """Attributes and functions of the package, but for what any tensor, list, string … has."""
    tree = ast.parse(textwrap.dedent(method.head + method.body))
    known = {name for kind in (Tensor, list, dict, str, set, range, deque, torch.dtype) for name in dir(kind)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    of_libraries = {node.attr for node in nodes if ast.unparse(node.value).split(".")[0] in LIBRARIES}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    ours = {item.name for item in method.imports if item.name and item.module.startswith("minisgl")}
    return ({node.attr for node in nodes} - known - of_libraries) | (called & ours)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("minisgl")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_what_is_to_be_reread_is_there(chapter: Chapter) -> None:
    for exercise in chapter.exercises:
        name, anchor = exercise.reread.split("#")
        path = chapter.folder / name
        if path.exists():  # a chapter is written after its exercises
            assert anchor in anchors(path), f"{exercise.number}: {path.name} has no section #{anchor}"
    assert CHECKPOINT.removeprefix("#") in anchors(chapter.folder / "README.md")


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_solution_is_done(chapter: Chapter) -> None:
    results = list(check(COURSE, chapter, chapter.exercises, chapter.solution))
    assert not [result for result in results if result.status != "done"], "\n".join(map(told, results))


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHER_ANSWERS, ids=lambda path: path.stem)
def test_another_right_answer_is_done_too(other: Path) -> None:
    """Tests of exercises hold what the docstrings ask for, and not how the package happens to do it."""
    chapter = COURSE.chapter(other.name[5])
    results = list(check(COURSE, chapter, chapter.exercises, other))
    assert not [result for result in results if result.status != "done"], "\n".join(map(told, results))


def told(result: Result) -> str:
    return f"{result.exercise.number} {result.status} {result.test}: {result.message}"


def facts(mutant: Path) -> dict[str, str]:
    """`kills`, `words` and, where `check` is to guess it, `likely`: read and not run."""
    tree = ast.parse(mutant.read_text("utf-8"))
    return {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@cache
def verdicts() -> dict[str, Verdict]:
    """Of all mutants, each against the one test that it names, in one process."""
    jobs = []
    for mutant in MUTANTS:
        answers, chapter = Answers(mutant), COURSE.chapter(mutant.name[5])
        wrong = [method for exercise in chapter.exercises for method in answers.of(exercise).methods]
        methods = tuple(method._replace(exercise=mutant.stem) for method in wrong)
        jobs.append(Job(mutant.stem, methods, (facts(mutant)["kills"],)))
    return {verdict.exercise: verdict for verdict in verdicts_on(jobs, COURSE.root)}


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first of them runs the tests of all
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda path: path.stem)
def test_a_mutant_is_killed_in_words(mutant: Path) -> None:
    """Wrong code that a learner might write. Its test fails by an assertion that says the right thing."""
    words, kills = facts(mutant)["words"], facts(mutant)["kills"]
    verdict = verdicts()[mutant.stem]
    assert verdict.calls, "the mutant was never called"
    assert verdict.failed, f"{kills} passes with this mutant"
    assert verdict.failed.startswith(kills), f"{verdict.failed} failed: {verdict.error}"
    assert verdict.error.startswith("AssertionError"), verdict.error
    assert words in verdict.error, verdict.error
    for exercise in COURSE.chapter(mutant.name[5]).exercises:
        if Answers(mutant).of(exercise).methods:
            assert facts(mutant).get("likely", "") in likely_mistake(exercise, verdict.error)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_stage_has_mutants(chapter: Chapter) -> None:
    """And every exercise's tests kill at least one."""
    own = [path for path in MUTANTS if path.name.startswith(f"stage{chapter.number}_")]
    assert len(own) >= MUTANTS_A_STAGE
    wrong = {exercise.number for path in own for exercise in chapter.exercises if Answers(path).of(exercise).methods}
    assert wrong == {exercise.number for exercise in chapter.exercises}, "exercises without a mutant"
    named = {test for exercise in chapter.exercises for test in exercise.tests}
    assert {facts(path)["kills"] for path in own} <= named, "a mutant names a test that is no exercise's"
