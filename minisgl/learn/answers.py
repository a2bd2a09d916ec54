"""What a learner has written so far, by reading the file: never by running it. Knows no test.

Also the ways to look right without being so: a method that is missing, misspelt, or asks the package for the answer.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from minisgl.learn.course import PACKAGE_ROOT, Exercise
from minisgl.learn.install import PREFIX, Method
from minisgl.learn.registry import PLACES

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Answer:
    exercise: Exercise
    status: Literal["to do", "written", "unusable"]
    message: str  # why it is unusable, or what of it is to do
    methods: tuple[Method, ...]  # those that are written


class Answers:
    """The learner's file."""

    def __init__(self, file: Path) -> None:
        """Raises ValueError when it is not there or is not Python."""
        self.file = file
        try:
            self.tree = ast.parse(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read {file} ({error.strerror})") from error
        except SyntaxError as error:
            raise ValueError(f"{file}, line {error.lineno}: {error.msg}") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error  # not UTF-8, say
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    def of(self, exercise: Exercise) -> Answer:
        found = [self._method(place) for place in exercise.places]
        problems = [problem for place in exercise.places for problem in self._problems(place)]
        written = [not is_stub(node) for node in found if node]
        methods = tuple(
            Method(exercise.number, place, str(self.file))
            for place, node in zip(exercise.places, found, strict=True)
            if node and not is_stub(node)
        )
        if problems:
            return Answer(exercise, "unusable", problems[0], methods)
        if not all(written):
            left = [place.split(".")[-1] for place in exercise.places if place not in {m.place for m in methods}]
            return Answer(exercise, "to do", f"{' and '.join(left)} still to write" if methods else "", methods)
        return Answer(exercise, "written", "", methods)

    def helpers(self, exercises: Sequence[Exercise]) -> list[Method]:
        """Methods that the learner added to the classes of these exercises."""
        owners = sorted({place.rsplit(".", 1)[0] for exercise in exercises for place in exercise.places})
        return [
            Method("", f"{owner}.{name}", str(self.file))
            for owner in owners
            for name in self._methods(owner)
            if name not in package_names(owner)
        ]

    def source(self, place: str) -> str:
        """The learner's lines of a method; "" if there are none."""
        node = self._method(place)
        return source_of(self.file.read_text(encoding="utf-8"), node) if node else ""

    def _methods(self, owner: str) -> dict[str, FunctionNode]:
        node = self.classes.get(PREFIX + owner.split(":")[1])
        return {item.name: item for item in node.body if isinstance(item, FunctionNode)} if node else {}

    def _method(self, place: str) -> FunctionNode | None:
        owner, name = place.rsplit(".", 1)
        return self._methods(owner).get(name)

    def _problems(self, place: str) -> Iterator[str]:
        owner, name = place.rsplit(".", 1)
        class_name, methods = owner.split(":")[1], self._methods(owner)
        if PREFIX + class_name not in self.classes:
            yield f"{self.file.name} has no class {PREFIX}{class_name}: the package's own {name} would be tested"
        elif name not in methods:
            near = difflib.get_close_matches(name, set(methods) - package_names(owner), n=1)
            meant = f" ({near[0]} is there: is that it?)" if near else ""
            yield f"{PREFIX}{class_name} has no method {name}{meant}: the package's own would be tested"
        else:
            yield from self._problems_inside(methods[name], class_name)
        for extra in sorted(methods.keys() & package_names(owner)):
            if f"{owner}.{extra}" not in marked_places():
                yield f"{PREFIX}{class_name}.{extra} is not an exercise and is not used: name your helper otherwise"

    def _problems_inside(self, method: FunctionNode, class_name: str) -> Iterator[str]:
        for decorator in method.decorator_list:
            if "exercise" in ast.unparse(decorator):
                yield f"take the line @{ast.unparse(decorator)} away: that mark belongs to the package's own method"
        own_exceptions = {name for name, node in self.classes.items() if _is_exception(node)}
        for node in ast.walk(method):
            if isinstance(node, ast.Name) and node.id == "super":
                yield f"{method.name} calls super(), which is the package's own answer: write it out"
            if isinstance(node, ast.Attribute) and node.attr == method.name and _last_name(node.value) == class_name:
                yield f"{method.name} calls {class_name}.{method.name}, the package's own answer: write it out"
            if isinstance(node, ast.Name) and node.id in own_exceptions:
                yield f"{node.id} is declared again in {self.file.name}, so none can catch yours: import the package's"


def is_stub(node: FunctionNode) -> bool:
    """Whether nothing is there yet but, say, `raise NotImplementedError`."""
    body = [item for item in node.body if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))]
    if not body:
        return True
    return len(body) == 1 and (
        isinstance(body[0], ast.Pass)
        or (isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.unparse(body[0]))
    )


def marked_places() -> set[str]:
    return {place for places in PLACES.values() for place in places}


def package_names(owner: str) -> set[str]:
    """What the package's class defines itself. owner: "module:Class"."""
    module, class_name = owner.split(":")
    tree = ast.parse((PACKAGE_ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return {item.name for item in node.body if isinstance(item, FunctionNode)}


def source_of(text: str, node: FunctionNode) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno]) + "\n"


def _is_exception(node: ast.ClassDef) -> bool:
    return any((_last_name(base) or "").endswith(("Error", "Exception", "Failure")) for base in node.bases)


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
