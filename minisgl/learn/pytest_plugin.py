"""pytest's `--mine 3`: the tests of exercises on a learner's code, one exercise's at a time, in this process.

What is still a stub is skipped as "to do". Without the option nothing happens: they are ordinary tests of the package.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minisgl.learn.answers import Answer, Answers
from minisgl.learn.course import Course
from minisgl.learn.install import Method, install

ANSWER = pytest.StashKey[tuple[Answer, tuple[Method, ...]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mine", metavar="N", help="test your own code: a chapter such as 3, or an exercise such as 3.1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only the tests of these exercises. One that is of two exercises is the first's."""
    which = config.getoption("--mine")
    if which is None:
        return
    try:
        chapter, exercises = Course().find(which)
        answers = Answers(chapter.code)
    except ValueError as error:
        raise pytest.UsageError(f"--mine {which}: {error}") from error
    helpers = tuple(answers.helpers(exercises))
    for exercise in reversed(exercises):
        for item in items:
            if any(f"{item.nodeid}[".startswith((f"{test}[", f"{test}::")) for test in exercise.tests):
                item.stash[ANSWER] = answers.of(exercise), helpers
    config.hook.pytest_deselected(items=[item for item in items if ANSWER not in item.stash])
    items[:] = [item for item in items if ANSWER in item.stash]


@pytest.fixture(autouse=True)
def learners_code(request: pytest.FixtureRequest) -> Iterator[None]:
    answer, helpers = request.node.stash.get(ANSWER, (None, ()))
    if answer is None:
        yield
        return
    if answer.status == "to do":
        pytest.skip(f"{answer.exercise.number} {answer.exercise.title} is to do")
    if answer.status == "unusable":
        pytest.fail(answer.message, pytrace=False)
    installer = install((*answer.methods, *helpers))
    yield
    installer.remove()
