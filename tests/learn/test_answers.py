"""What looks right and is not is reported, never shown as done. The learner's file is read, not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.learn.answers import Answer, Answers
from minisgl.learn.course import Course

CHAPTER, (EXERCISE,) = Course().find("3.1")
HEAD = "from minisgl.stage3.page_pool import PageAllocator\nfrom minisgl.learn import exercise\n\n"
CLASS = "class MyPageAllocator(PageAllocator):\n"


def answer(tmp_path: Path, text: str) -> Answer:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + text)
    return Answers(file).of(EXERCISE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no class MyPageAllocator"),
        ("class PageAllocator(PageAllocator):\n def allocate(self, count): return 1", "no class MyPageAllocator"),
        (CLASS + " def alocate(self, count): return 1", "no method allocate (alocate is there: is that it?)"),
        (CLASS + " pass", "no method allocate: the package's own would be tested"),
        (CLASS + " @exercise('3.1')\n def allocate(self, count): return 1", "take the line @exercise('3.1') away"),
        (CLASS + " def allocate(self, count): return super().allocate(count)", "calls super()"),
        (CLASS + " def allocate(self, count): return PageAllocator.allocate(self, count)", "own answer: write it out"),
        (
            CLASS + " def allocate(self, count): return 1\n def free_pages(self): return 2",
            "free_pages is not an exercise",
        ),
        (
            "class PoolError(RuntimeError): ...\n" + CLASS + " def allocate(self, count): raise PoolError",
            "PoolError is declared again",
        ),
    ],
)
def test_traps(tmp_path: Path, text: str, words: str) -> None:
    found = answer(tmp_path, text)
    assert found.status == "unusable"
    assert words in found.message


@pytest.mark.parametrize(
    "body", ["raise NotImplementedError('exercise 3.1')", "raise NotImplementedError", "pass", "...", "'doc'; pass"]
)
def test_stubs(tmp_path: Path, body: str) -> None:
    found = answer(tmp_path, f"{CLASS} def allocate(self, count):\n  {body}")
    assert (found.status, found.methods) == ("to do", ())


def test_a_helper_is_the_learners_own(tmp_path: Path) -> None:
    found = answer(
        tmp_path, CLASS + " def allocate(self, count): return self.take(count)\n def take(self, n): return n"
    )
    assert found.status == "written"
    helpers = Answers(tmp_path / "mine.py").helpers([EXERCISE])
    assert [(h.exercise, h.place) for h in helpers] == [("", "minisgl.stage3.page_pool:PageAllocator.take")]


def test_half_of_an_exercise_of_two_methods_is_to_do(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class MyRadixCache(RadixCache):\n def lock(self, handle): return 1\n def unlock(self, handle): raise "
        "NotImplementedError"
    )
    found = Answers(file).of(Course().find("4.4")[1][0])
    assert (found.status, found.message) == ("to do", "unlock still to write")
    assert [method.place for method in found.methods] == ["minisgl.stage4.radix_cache:RadixCache.lock"]
