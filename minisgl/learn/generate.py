"""What is made of the marks: skeletons, solutions, registry. Knows no exercise's text.

`python -m minisgl.learn generate` writes them; with `--check` it only says which are not current.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.learn.course import Chapter, Course, read_toml
from minisgl.learn.install import PREFIX
from minisgl.learn.source import Import, Marked, import_lines, marked_methods

NOQA = "\n# ruff: noqa: F401 (imports for the answers)\n"
GENERATED = "Generated from the package by `python -m minisgl.learn generate`: a change here is lost."


def main(check: bool) -> int:
    """Returns the exit status: 1 when something is not current and `check` was asked for."""
    course = Course()
    stale = [path for path, text in generated(course).items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{'not current' if check else 'written'}: {path.relative_to(course.root)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(generated(course)[path], encoding="utf-8")
    if check and stale:
        print("run `python -m minisgl.learn generate`")
    return 1 if check and stale else 0


def generated(course: Course) -> dict[Path, str]:
    """Every file with its text. Raises ValueError when marks and exercises.toml do not name the same exercises."""
    marked = marked_methods(course.root)
    files = {course.root / "minisgl" / "learn" / "registry.py": registry(marked)}
    told = {number for chapter in course.chapters for number in read_toml(chapter.folder / "exercises.toml")}
    if told != {method.number for method in marked}:
        differ = ", ".join(sorted(told ^ {method.number for method in marked}))
        raise ValueError(f"marks in the package and exercises.toml differ in {differ}")
    for chapter in course.chapters:
        of_chapter = [method for method in marked if method.number.split(".")[0] == str(chapter.number)]
        tables = read_toml(chapter.folder / "exercises.toml")
        files[chapter.skeleton] = skeleton(chapter, of_chapter, tables)
        files[chapter.solution] = solution(chapter, of_chapter, tables)
    return files


def registry(marked: Sequence[Marked]) -> str:
    places: dict[str, list[str]] = {}
    for method in marked:
        places.setdefault(method.number, []).append(method.place)
    lines = "".join(
        f'    "{number}": ({", ".join(f"{place!r}" for place in found)},),\n'.replace("'", '"')
        if len(found) == 1
        else f'    "{number}": (\n' + "".join(f'        "{place}",\n' for place in found) + "    ),\n"
        for number, found in places.items()
    )
    doc = f'"""Which methods are which exercise. Knows nothing else.\n\n{GENERATED}\n"""\n'
    return f"{doc}\nPLACES: dict[str, tuple[str, ...]] = {{\n{lines}}}\n"


def skeleton(chapter: Chapter, marked: Sequence[Marked], tables: dict[str, Any]) -> str:
    number = chapter.number
    doc = f'''"""Stage {number}, {chapter.title}: your code.

`minisgl start {number}` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check {number}` says how you stand, `minisgl hint {number}.1` helps.
A method may use the rest of its class, and what is imported here; what it needs of both is listed above it. Methods
that you add beside it are yours too.

{GENERATED}
"""'''
    bodies = {m: f'{m.doc}        raise NotImplementedError("exercise {m.number}")\n' for m in marked}
    code = _module(marked, bodies, {place: _comment(*place, tables[place[0]]) for place in _places(marked)})
    imported = {item.alias or item.name or item.module for m in marked for item in m.imports}
    spare = imported - {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    return f"{doc}\n{NOQA.rstrip() if spare else ''}{code}"


def solution(chapter: Chapter, marked: Sequence[Marked], tables: dict[str, Any]) -> str:
    title = f"Stage {chapter.number}, {chapter.title}: the package's own methods. Knows no other way."
    doc = f'"""{title}\n\n{GENERATED}\n"""\n'
    comments = {place: f"    # {place[0]} {tables[place[0]]['title']}\n" for place in _places(marked)}
    return f"{doc}{_module(marked, {m: m.doc + m.body for m in marked}, comments)}"


def _places(marked: Sequence[Marked]) -> set[tuple[str, str]]:
    """An exercise has a part in one class or in several."""
    return {(m.number, m.class_name) for m in marked}


def _comment(number: str, class_name: str, table: dict[str, Any]) -> str:
    given = [part for line in table["given"][class_name] for part in _wrap(line)]
    return "\n".join([f"    # {number} {table['title']}", *given, ""])


_wrap = textwrap.TextWrapper(120, initial_indent="    #   ", subsequent_indent="    #       ").wrap


def _module(marked: Sequence[Marked], bodies: dict[Marked, str], comments: dict[tuple[str, str], str]) -> str:
    bases = {Import(m.module, m.class_name) for m in marked}
    imports = bases.union(*(m.imports for m in marked))
    text = f"\nfrom __future__ import annotations\n\n{import_lines(imports)}\n"
    for owner in dict.fromkeys((m.module, m.class_name) for m in marked):
        text += f"\n\nclass {PREFIX}{owner[1]}({owner[1]}):"
        last = ""
        for m in marked:
            if (m.module, m.class_name) == owner:
                text += f"\n{comments[m.number, m.class_name]}" if m.number != last else "\n"
                text += m.head + bodies[m]
                last = m.number
    return text
