"""What CI cannot run still uses names that exist: of the package's modules, as tests for GPUs write them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOR_GPUS = [path for path in sorted(TESTS.rglob("*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]


@cache
def source(module: str) -> Path | None:
    """Of a module of the package, which is not imported: some need Triton. None: it is no module."""
    place = TESTS.parent.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()), None)


@cache
def names(path: Path) -> frozenset[str]:
    """All that the module's own lines bind, and the modules beside it if it is a package."""
    found = {each.stem for each in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name).split(".")[0] for each in node.names}
    return frozenset(found)


def used(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name): what is imported from the package, and what is read of its modules by their names here."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "minisgl":
            for each in node.names:
                yield str(node.module), each.name
                if source(f"{node.module}.{each.name}") is not None:
                    modules[each.asname or each.name] = f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


@pytest.mark.parametrize("path", FOR_GPUS, ids=lambda path: path.stem)
def test_names_of_the_package_exist(path: Path) -> None:
    for module, name in used(ast.parse(path.read_text(encoding="utf-8"))):
        file = source(module)
        assert file is not None, f"no module {module}"
        assert name in names(file) or name.startswith("__"), f"{module} has no {name}"


def test_a_name_that_moved_is_found() -> None:
    tree = ast.parse("from minisgl.models import fuse\nfuse._experts(1)\nfuse.fuse(2)")
    missing = [name for module, name in used(tree) if name not in names(source(module) or Path())]
    assert missing == ["_experts"]
    assert len(FOR_GPUS) > 8
