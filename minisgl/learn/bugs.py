"""`minisgl bug N`: a stage with one method changed for the worse, and what it does to a run. Knows no answer.

The changed methods and the runs lie in tests/mutants; the key is solutions/bug_hunts.md.
"""

from __future__ import annotations

import ast
import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl.core.outputs import Completion
from minisgl.core.sampling_params import SamplingParams
from minisgl.learn.course import Course, read_toml
from minisgl.learn.install import PREFIX, VARIABLE, Method, publish

EXACT = {"device": "cpu", "dtype": "float32", "threads": 1}  # so that two runs differ in nothing but the bug


@dataclass(frozen=True)
class Bug:
    """One table of hunts.toml."""

    title: str
    stage: int
    file: str  # of the changed methods
    calls: list[list[str]]  # prompts of each `generate`
    params: dict[str, Any]  # of SamplingParams; a list of max_tokens is one for each prompt
    figures: list[str]  # that show something
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    completions: list[Completion] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)
    error: str = ""


def main(number: str | None) -> int:
    """Run one, or list them. Returns the exit status; raises ValueError when there is no such bug."""
    course = Course()
    found = bugs(course)
    if number is None:
        print("\n".join(f"{name}  stage {bug.stage}  {bug.title}" for name, bug in found.items()))
        return 0
    if number not in found:
        raise ValueError(f"there is no bug {number!r:.80}: there are {', '.join(found)}")
    bug = found[number]
    traces = [Path(f"trace-bug{number}{suffix}.json") for suffix in ("-expected", "")]
    print(
        f"Bug {number} · stage {bug.stage} · {bug.title}: somebody has changed one method of the package.\n", flush=True
    )
    expected = run(bug, [], traces[0])
    came = run(bug, changed_methods(folder(course) / bug.file), traces[1])
    print("\n".join(differences(expected, came)))
    print("\nThe same run as it should be, and as it was, to look at side by side:")
    for figure in bug.figures:
        for trace in traces:
            print(f"  python -m minisgl.viz {trace} --figure {figure} -o {trace.stem}-{figure}.png")
    print(f"\nWhich method is it, and which line? Then: solutions/bug_hunts.md, bug {number}.")
    return 0


def folder(course: Course) -> Path:
    return course.root / "tests" / "mutants"


def bugs(course: Course) -> dict[str, Bug]:
    return {number: Bug(**table) for number, table in read_toml(folder(course) / "hunts.toml").items()}


def changed_methods(file: Path) -> list[Method]:
    """Those of the classes My…, each of which names the class of the package that it stands for as its base."""
    tree = ast.parse(file.read_text("utf-8"))
    modules = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return [
        Method("", f"{modules[node.name.removeprefix(PREFIX)]}:{node.name.removeprefix(PREFIX)}.{item.name}", str(file))
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.FunctionDef)
    ]


def run(bug: Bug, methods: Sequence[Method], trace: Path) -> Outcome:
    """Whatever a bug may raise is part of what comes of it."""
    llm_class = importlib.import_module(f"minisgl.stage{bug.stage}.llm").LLM
    outcome = Outcome()
    installer = publish(methods, calls="")  # nobody counts them
    try:
        with llm_class(trace=str(trace), **EXACT, **bug.options) as llm:
            for prompts in bug.calls:
                outcome.completions += llm.generate(prompts, _params(bug, len(prompts)))
            outcome.stats = llm.stats()
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        installer.remove()
        del os.environ[VARIABLE]
    return outcome


def _params(bug: Bug, count: int) -> list[SamplingParams]:
    lengths = bug.params["max_tokens"]
    lengths = lengths if isinstance(lengths, list) else [lengths] * count
    return [SamplingParams(**{**bug.params, "max_tokens": length}) for length in lengths]


def differences(expected: Outcome, came: Outcome) -> Iterator[str]:
    """In words, also what is the same."""
    if came.error:
        yield f"the run      ended with {came.error}"
    for uid, right in enumerate(expected.completions):
        wrong = came.completions[uid] if uid < len(came.completions) else None
        yield from _pair(f"request {uid}", repr(right.text), repr(wrong.text) if wrong else "no answer")
        if wrong and right.cached_tokens != wrong.cached_tokens:
            yield from _pair("", f"{right.cached_tokens} cached tokens", f"{wrong.cached_tokens} cached tokens")
    for name, value in expected.stats.items():
        if came.stats:
            yield from _pair(name.replace("_", " "), str(value), str(came.stats[name]))


def _pair(what: str, expected: str, came: str) -> Iterator[str]:
    if expected == came:
        yield f"{what:<12} as expected: {expected}"
    else:
        yield f"{what:<12} expected:    {expected}"
        yield f"{'':<12} came:        {came}"
