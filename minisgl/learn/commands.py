"""The learner's subcommands: start, check, hint, diff, progress, changed, bug. Knows nothing of how code is tested."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import textwrap
from collections.abc import Sequence

from minisgl.core.terminal import json_line, show_any_text
from minisgl.learn.answers import Answers
from minisgl.learn.bugs import main as bug
from minisgl.learn.changes import main as changed
from minisgl.learn.checking import check, not_begun, show
from minisgl.learn.course import Chapter, Course
from minisgl.learn.generate import main as generate
from minisgl.learn.memory import next_hint, remembered
from minisgl.learn.source import marked_methods

COMMANDS = ("start", "check", "hint", "diff", "progress", "changed", "bug")


def main(argv: Sequence[str]) -> int:
    """`minisgl COMMAND …`. Returns the exit status: 0 when all is well (for `check`: done), 2 for what was asked
    wrongly."""
    show_any_text()
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minisgl", description="the course: write the missing code, stage by stage")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, help_text in (
        ("start", _start, "copy a chapter's exercises to its mine.py, which is yours"),
        ("check", _check, "test your code"),
        ("hint", _hint, "the next hint for an exercise"),
        ("diff", _diff, "your code beside the package's"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("which", metavar="3 or 3.1" if run in (_check, _diff) else "3" if run is _start else "3.1")
        command.set_defaults(run=run)
        if run is _check:
            command.add_argument("--json", action="store_true", help="one object an exercise, one a line")
    changes = commands.add_parser("changed", help="how a stage's loop differs from that of the stage before")
    changes.add_argument("stage", metavar="N")
    changes.set_defaults(run=lambda args: changed(args.stage))
    hunt = commands.add_parser("bug", help="run a stage with a bug in it, for you to find; without N: which there are")
    hunt.add_argument("number", nargs="?", metavar="N")
    hunt.set_defaults(run=lambda args: bug(args.number))
    progress = commands.add_parser("progress", help="how far you are")
    progress.set_defaults(run=_progress)
    generation = commands.add_parser("generate", help="make skeletons, solutions and registry of the package's marks")
    generation.add_argument("--check", action="store_true", help="only say what is not current")
    generation.set_defaults(run=lambda args: generate(args.check))
    return parser


def _start(args: argparse.Namespace) -> int:
    course = Course()
    chapter = course.chapter(args.which)
    mine = chapter.mine.relative_to(course.root)
    if chapter.mine.exists():
        raise ValueError(f"{mine} is there already and stays as it is: move it away to begin again")
    shutil.copyfile(chapter.skeleton, chapter.mine)
    first = chapter.exercises[0]
    minutes = sum(exercise.minutes for exercise in chapter.exercises)
    print(f"{mine} is yours: {len(chapter.exercises)} exercises, about {minutes} minutes.")
    print(f"Begin with {first.number} {first.title}, then `minisgl check {first.number}`.")
    return 0


def _check(args: argparse.Namespace) -> int:
    course = Course()
    if not args.json:
        return 0 if show(args.which, course) else 1
    chapter, exercises = course.find(args.which)
    done = True
    for result in check(course, chapter, exercises):
        done &= result.status == "done"
        found = {"exercise": result.exercise.number, "status": result.status, "message": result.message}
        print(json_line(found), flush=True)
    if not chapter.mine.exists():
        print(not_begun(chapter), file=sys.stderr)
    return 0 if done else 1


def _hint(args: argparse.Namespace) -> int:
    chapter, exercises = Course().find(args.which)
    if "." not in args.which:
        raise ValueError(f"which exercise? For the first: `minisgl hint {exercises[0].number}`")
    exercise = exercises[0]
    index = next_hint(chapter, exercise)
    print(f"{exercise.number} {exercise.title} · hint {index + 1} of {len(exercise.hints)}\n")
    print(textwrap.fill(exercise.hints[index], 100, initial_indent="  ", subsequent_indent="  "))
    if index + 1 == len(exercise.hints):
        print(f"\nThat was the last. `minisgl diff {exercise.number}` shows the package's own code.")
    return 0


def _diff(args: argparse.Namespace) -> int:
    course = Course()
    chapter, exercises = course.find(args.which)
    answers = Answers(chapter.code)
    package = {method.place: method.head + method.doc + method.body for method in marked_methods(course.root)}
    for place in (place for exercise in exercises for place in exercise.places):
        yours, ours = answers.source(place).splitlines(), package[place].splitlines()
        print("\n".join(difflib.unified_diff(yours, ours, "yours", place, lineterm="", n=99)) or f"{place}: the same")
    return 0


def _progress(args: argparse.Namespace) -> int:
    course = Course()
    for chapter in course.chapters:
        try:
            states = _states(chapter)
        except ValueError as error:  # the file is not Python: the other chapters are as they were
            print(f"{chapter.number}  {chapter.title:<18} {'✗' * len(chapter.exercises):<8} {error}")
            continue
        done = sum(state == "done" for state in states)
        bar = "".join({"done": "■", "failed": "✗", "written": "▪"}.get(state, "·") for state in states)
        words = (
            f"{done} of {len(states)} done" if chapter.mine.exists() else f"not begun: `minisgl start {chapter.number}`"
        )
        print(f"{chapter.number}  {chapter.title:<18} {bar:<8} {words}")
    print("\n■ done   ✗ failed   ▪ written, and not checked since: `minisgl check N`   · to do")
    return 0


def _states(chapter: Chapter) -> list[str]:
    if not chapter.mine.exists():
        return ["to do" for _ in chapter.exercises]
    answers = Answers(chapter.mine)
    states = []
    for exercise in chapter.exercises:
        answer = answers.of(exercise)
        states.append(remembered(chapter, exercise, answers) or answer.status)
    return ["failed" if state == "unusable" else state for state in states]
