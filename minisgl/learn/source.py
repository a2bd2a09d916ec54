"""Finds the marked methods in the package's source, and cuts them out. Knows nothing of chapters."""

from __future__ import annotations

import ast
import builtins
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One name that a method's text needs. `name` is None for `import module`."""

    module: str
    name: str | None
    alias: str | None = None

    def __str__(self) -> str:
        renamed = f" as {self.alias}" if self.alias else ""
        return f"{self.name or self.module}{renamed}"


@dataclass(frozen=True)
class Marked:
    """A method that bears an exercise's number."""

    number: str
    module: str
    class_name: str
    name: str
    head: str  # decorators and signature, with the indentation of a method
    doc: str  # the docstring's lines, the same; "" if there is none
    body: str  # the rest
    imports: frozenset[Import]  # of every name from outside

    @property
    def place(self) -> str:
        return f"{self.module}:{self.class_name}.{self.name}"


def marked_methods(root: Path) -> list[Marked]:
    """All of a checkout's package, in the order of their numbers. Raises ValueError for a mark on anything else."""
    found: list[Marked] = []
    for path in sorted((root / "minisgl").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "@exercise(" in text and path.parent.name != "learn":
            found += _marked_in(text, ".".join(path.relative_to(root).with_suffix("").parts))
    return sorted(found, key=lambda marked: [int(part) for part in marked.number.split(".")])


def _marked_in(text: str, module: str) -> Iterator[Marked]:
    tree = ast.parse(text)
    names = dict(_names(tree, module))
    methods = {item: node for node in tree.body if isinstance(node, ast.ClassDef) for item in node.body}
    for node in ast.walk(tree):
        marks = [d for d in getattr(node, "decorator_list", []) if _mark_number(d)]
        if not marks:
            continue
        if not isinstance(node, FunctionNode) or node not in methods:
            raise ValueError(
                f"{module}, line {marks[0].lineno}: only a method of a class at the top can be an exercise"
            )
        yield _marked(node, methods[node].name, _mark_number(marks[0]), text, module, names)


def _marked(
    node: FunctionNode, class_name: str, number: str, text: str, module: str, names: dict[str, Import]
) -> Marked:
    lines = text.splitlines(keepends=True)
    has_doc = ast.get_docstring(node) is not None
    first_line = node.body[0].lineno - 1
    rest = node.body[0].end_lineno if has_doc else first_line
    decorators = [d for d in node.decorator_list if not _mark_number(d)]
    head = "".join(f"    @{ast.unparse(d)}\n" for d in decorators) + "".join(lines[node.lineno - 1 : first_line])
    used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} - {"exercise"}
    used |= set(_names_in_annotations(node))
    unknown = used - names.keys() - set(dir(builtins)) - set(_own_names(node))
    if unknown:
        raise ValueError(f"{module}: {class_name}.{node.name} uses {sorted(unknown)}, whose origin is not known")
    return Marked(
        number=number,
        module=module,
        class_name=class_name,
        name=node.name,
        head=head,
        doc="".join(lines[first_line:rest]) if has_doc else "",
        body="".join(lines[rest : node.end_lineno]),
        imports=frozenset(names[name] for name in used - set(_own_names(node)) if name in names),
    )


def _mark_number(decorator: ast.expr) -> str:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "exercise":
        return ast.literal_eval(decorator.args[0])
    return ""


def _names(tree: ast.Module, module: str) -> Iterator[tuple[str, Import]]:
    """What a module's own text may use, and how another module would import it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.asname or a.name, Import(a.name, None, a.asname)) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
            yield from ((a.asname or a.name, Import(node.module, a.name, a.asname)) for a in node.names)
    for item in tree.body:
        if isinstance(item, ast.ClassDef | ast.FunctionDef):
            yield item.name, Import(module, item.name)
        elif isinstance(item, ast.Assign):
            yield from ((t.id, Import(module, t.id)) for t in item.targets if isinstance(t, ast.Name))
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id, Import(module, item.target.id)


def _own_names(node: FunctionNode) -> Iterator[str]:
    """Arguments and variables of a method, caught errors and nested functions' included."""
    for item in ast.walk(node):
        if isinstance(item, ast.arg):
            yield item.arg
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            yield item.id
        elif isinstance(item, FunctionNode | ast.ExceptHandler) and item is not node and item.name:
            yield item.name


def _names_in_annotations(node: FunctionNode) -> Iterator[str]:
    """Quoted annotations."""
    for item in ast.walk(node):
        if isinstance(item, ast.arg | ast.AnnAssign) and isinstance(item.annotation, ast.Constant):
            yield from (n.id for n in ast.walk(ast.parse(str(item.annotation.value))) if isinstance(n, ast.Name))


def import_lines(imports: Iterable[Import]) -> str:
    """In the house's order: the standard library, others, the package."""
    groups: dict[int, list[str]] = {0: [], 1: [], 2: []}
    by_module: dict[str, list[str]] = {}
    for item in set(imports):
        if item.name is None:
            groups[_group(item.module)].append(f"import {item}")
        else:
            by_module.setdefault(item.module, []).append(str(item))
    for module, names in by_module.items():
        line = f"from {module} import {', '.join(sorted(names, key=_name_order))}"
        groups[_group(module)].append(line if len(line) <= 120 else _wrapped(module, names))
    order = [sorted(lines, key=lambda line: (line.startswith("from"), line)) for lines in groups.values()]
    return "\n\n".join("\n".join(lines) for lines in order if lines)


def _group(module: str) -> int:
    top = module.split(".")[0]
    return 2 if top == "minisgl" else 0 if top in sys.stdlib_module_names else 1


def _name_order(name: str) -> tuple[int, str]:
    """Constants, classes, functions, as ruff sorts them."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name)


def _wrapped(module: str, names: list[str]) -> str:
    inside = textwrap.indent("".join(f"{name},\n" for name in sorted(names, key=_name_order)), "    ")
    return f"from {module} import (\n{inside})"
