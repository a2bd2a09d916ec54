"""`--mine 3`: these tests on a learner's code, one exercise's at a time; what is still a stub is skipped as "to do".

Without it they are ordinary tests of the package.
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
    if config.getoption("--mine") is None:
        return
    chapter, exercises = Course().find(config.getoption("--mine"))
    try:
        answers = Answers(chapter.mine)
    except ValueError as error:
        raise pytest.UsageError(f"--mine: {error}; `minisgl start {chapter.number}` makes the file") from error
    helpers = tuple(answers.helpers(exercises))
    chosen = []
    for exercise in exercises:
        for item in items:
            if item.nodeid.split("[")[0].startswith(exercise.tests):
                item.stash[ANSWER] = answers.of(exercise), helpers
                chosen.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


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
