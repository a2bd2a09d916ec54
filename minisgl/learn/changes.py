"""How a stage's loop differs from that of the stage before, read from the source. Knows nothing of what a loop does."""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
COLORS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}
PLAIN = "\033[0m"


def main(number: str) -> int:
    """Print it, in colour on a terminal. Returns the exit status; raises ValueError for what is no later stage."""
    lines = changed(number)
    sys.stdout.writelines(f"{line}\n" for line in (coloured(lines) if sys.stdout.isatty() else lines))
    return 0


def changed(number: str) -> Iterator[str]:
    """What the stage says its loop is, its other modules, and llm.py against the earlier one, name by name."""
    stages = sorted(int(folder.name[5:]) for folder in PACKAGE.glob("stage*") if folder.name[5:].isdecimal())
    if number not in map(str, stages[1:]):
        known = f"{stages[1]} to {stages[-1]}"
        raise ValueError(f"`minisgl changed N` takes a stage that has one before it, {known}, not {number!r:.80}")
    return _changed(PACKAGE / f"stage{number}", PACKAGE / f"stage{int(number) - 1}")


def _changed(new: Path, old: Path) -> Iterator[str]:
    yield f"Stage {new.name[5:]}: {job(new / 'llm.py')}"
    parts = [path for path in sorted(new.glob("*.py")) if path.stem not in ("__init__", "__main__", "llm")]
    width = max((len(path.name) for path in parts), default=0)
    yield from ["", f"Beside its loop, minisgl/{new.name}/ has"] if parts else []
    yield from (f"  {path.name:<{width}}  {job(path)}" for path in parts)
    yield from ["", f"--- minisgl/{old.name}/llm.py", f"+++ minisgl/{new.name}/llm.py"]
    before, now = definitions(old / "llm.py"), definitions(new / "llm.py")
    for name in [*now, *(name for name in before if name not in now)]:
        lines = list(difflib.unified_diff(before.get(name, []), now.get(name, []), lineterm="", n=99))[3:]
        if lines:
            yield from ["", f"@@ {name}", *lines]


def job(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n")[0]


def definitions(path: Path) -> dict[str, list[str]]:
    """The source lines of each function and method by name, and of what a class has before its first method."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    found: dict[str, list[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = lines[_first(node) - 1 : node.end_lineno]
        elif isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            end = min((_first(method) for method in methods), default=(node.end_lineno or 0) + 1)
            found[f"class {node.name}"] = [line for line in lines[node.lineno - 1 : end - 1] if line.strip()]
            for method in methods:
                found[f"{node.name}.{method.name}"] = lines[_first(method) - 1 : method.end_lineno]
    return found


def _first(node: ast.FunctionDef) -> int:
    """Its first line, decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def coloured(lines: Iterable[str]) -> Iterator[str]:
    """Green is new, red is gone."""
    for line in lines:
        color = COLORS.get(line[:1])
        yield f"{color}{line}{PLAIN}" if color else line
