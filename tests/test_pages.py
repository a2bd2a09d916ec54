"""What the pages say can be done, can be: links lead somewhere, commands parse, code compiles, red is as shown."""

from __future__ import annotations

import ast
import importlib
import textwrap
from pathlib import Path

import pages
import pytest
from test_setup import setup

from minisgl import where
from minisgl.benchmark.__main__ import COMMANDS as MEASUREMENTS
from minisgl.core import cli
from minisgl.kernel import selftest
from minisgl.learn import commands as learning
from minisgl.learn.checking import check, lines
from minisgl.learn.course import Chapter, Course
from minisgl.stage8 import args as server
from minisgl.viz.__main__ import _parser as figure_parser

COURSE = Course()
PAGES = [pytest.param(page, id=page.relative_to(pages.ROOT).as_posix()) for page in pages.PAGES]
WRITTEN = [chapter for chapter in COURSE.chapters if (chapter.folder / "README.md").exists()]  # after its exercises
CHAPTERS = [pytest.param(chapter, id=f"stage{chapter.number}") for chapter in WRITTEN]
OTHERS = {"curl", "source", "cd", "export", "pip", "git", "jupyter", "jupytext", "for", "do", "done", "cp"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    """Also to the heading, and to the test or the class that the link's text names."""
    for text, target in pages.links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"[{text}]({target}): there is no {path}"
        if anchor and file.suffix == ".md":
            assert anchor in pages.anchors(file), f"[{text}]({target}): no heading there makes this anchor"
        name = text.strip("`")
        if file.suffix == ".py" and name.startswith("test_") and name.isidentifier():
            assert name in file.read_text("utf-8"), f"[{text}]({target}): the file has no {name}"


def test_no_page_and_no_figure_is_left_alone() -> None:
    """Whoever begins with the README comes to all of them. (Solutions are found by the chapter's name.)"""
    wanted = {*pages.ROOT.glob("chapters/**/*.md"), *pages.ROOT.glob("chapters/**/*.png")}
    reached, waiting = set(), [pages.ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            targets = [target.partition("#")[0] for _, target in pages.links(page)] if page.suffix == ".md" else []
            waiting += [(page.parent / target).resolve() for target in targets if target]
    assert not wanted - reached, "no link leads there"


@pytest.mark.parametrize("page", PAGES)
def test_commands_can_be_given(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Parsed by the parser of the program that they name, and not run."""
    monkeypatch.setattr(cli, "with_mine", lambda mine, work: 0)
    for words, whole in pages.commands(page):
        try:
            status = parsed(words, whole)
        except (SystemExit, ValueError) as error:
            status = getattr(error, "code", 2)
        assert status in (0, None), f"{' '.join(words)}\n{capsys.readouterr().err}"


def parsed(words: list[str], whole: bool) -> int | None:
    """Returns 0 or None, raises ValueError or SystemExit for what is wrong. whole: not the mere name of a command."""
    program, *rest = ["1" if word == "N" else word for word in words]  # as in "minisgl start N"
    if program == "minisgl":
        return of_minisgl(rest, whole)
    if program.endswith(("python", "python3")) and rest[:1] == ["-m"]:
        return of_module(rest[1], rest[2:], whole)
    if rest[:1] == ["dev/setup.py"]:
        return 0 if rest[1] in setup.EXTRAS else 2
    if program.endswith("pytest"):
        return 0 if all((pages.ROOT / word.split("::")[0]).exists() for word in rest if "/" in word) else 2
    return 0 if program.split("/")[-1] in OTHERS else 2


def of_minisgl(rest: list[str], whole: bool) -> int | None:
    if rest[:1] == ["where"]:
        return where.main([] if rest[1:] == ["WORD"] else rest[1:])
    if rest[:1] and rest[0] in learning.COMMANDS:
        if whole or len(rest) > 1:
            COURSE.find(getattr(learning._parser().parse_args(rest), "which", "1"))
        return 0
    return of_module("minisgl.stage8", rest, whole)


def of_module(module: str, rest: list[str], whole: bool) -> int | None:
    if "--help" in rest:
        importlib.import_module(f"{module}.__main__" if module != "minisgl" else "minisgl.__main__")
        return 0
    if "--mine" in rest:
        for number in rest[rest.index("--mine") + 1].replace("all", "1").split(","):
            COURSE.find(number)
    if module in ("minisgl", "minisgl.stage8"):
        server.parse(rest, module)
    elif module.startswith("minisgl.stage"):
        rest = rest if whole or "--prompt" in rest else [*rest, "--prompt", "x"]
        return cli.main(importlib.import_module(f"{module}.llm").LLM, rest)
    elif module == "minisgl.viz":
        figure_parser().parse_args(rest)
    elif module == "minisgl.benchmark":
        parser = cli.Parser()
        MEASUREMENTS[rest[0]][1](parser)
        parser.parse_args(rest[1:])
    elif module == "minisgl.kernel.selftest":
        selftest.parser().parse_args(rest)
    elif module == "minisgl.learn":
        learning._parser().parse_args(rest)
    else:
        raise ValueError(f"no test knows how to read a command of {module}")
    return 0


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles(page: Path) -> None:
    for block in pages.blocks(page):
        if block.language == "python":
            ast.parse(textwrap.dedent(block.text))


EXAMPLES = [(page, block.text) for page in pages.PAGES for block in pages.blocks(page) if block.runs]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), EXAMPLES, ids=[page.parent.name for page, _ in EXAMPLES])
def test_examples_run(page: Path, text: str) -> None:
    exec(compile(text, str(page), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_solutions_are_explained_as_they_are(chapter: Chapter) -> None:
    """The code on a solution's page is cut from the package; comments may be left out, and what ... stands for."""
    page = chapter.solution.with_suffix(".md")
    if not page.exists():
        pytest.skip(f"{page.name} is not written yet")
    package = statements(chapter.solution.read_text("utf-8"))
    for block in pages.blocks(page):
        if block.language == "python":
            missing = statements(textwrap.dedent(block.text)) - package
            assert not missing, f"{page.name}: {sorted(missing)}"


def statements(code: str) -> set[str]:
    return {line.strip() for line in ast.unparse(ast.parse(code)).splitlines() if "..." not in line}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_red_that_is_shown_is_what_comes(chapter: Chapter) -> None:
    page = chapter.folder / "README.md"
    shown = [line for block in pages.blocks(page) for line in block.text.splitlines() if line.endswith(" to do")]
    assert shown == [lines(result) for result in check(COURSE, chapter, chapter.exercises, chapter.skeleton)]
    minutes = sum(exercise.minutes for exercise in chapter.exercises)
    assert f"{len(chapter.exercises)} exercises, about {minutes} minutes" in page.read_text("utf-8")


def test_what_is_wrong_on_a_page_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers of pages must not be blind."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title`, twice\n# A title twice\n[x](#a-title-twice-1) [y](gone.md#z)\n"
        "`minisgl check 3.9` and `python -m minisgl.stage2 --page-size 4`\n"
        '```console\n$ X=1 python -m minisgl.stage1 \\\n    --no-such-flag | tee "a b"\noutput\n```\n'
    )
    assert pages.anchors(page) == {"a-title-twice", "a-title-twice-1"}
    assert [target for _, target in pages.links(page)] == ["#a-title-twice-1", "gone.md#z"]
    found = list(pages.commands(page))
    assert [words[-1] for words, _ in found] == ["--no-such-flag", "a b", "3.9", "4"]
    monkeypatch.setattr(cli, "with_mine", lambda mine, work: 0)
    for words, whole in found:
        if words[0] == "tee":
            assert parsed(words, whole) == 2
            continue
        with pytest.raises((SystemExit, ValueError)):
            parsed(words, whole)
