"""The laws of the house, held by reading the code: who may import whom, and who may ask which device it is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.core.config import Config
from minisgl.core.context import Context
from minisgl.core.sampling_params import SamplingParams
from minisgl.models.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1] / "minisgl"
LIBRARY = ("models", "layers", "attention", "moe", "kernel", "sampling")
STAGES = range(1, 9)
DEVICE_ROOMS = ("kernel/", "attention/", "sampling/", "stage6/communicators", "stage7/streams", "stage7/graph_runner")
DEVICE_QUESTION = re.compile(
    r"""\.is_cuda\b|\.type\s*[!=]=\s*["'](?:cpu|cuda|mps)|torch\.cuda\.(?!Event\b)|torch\.version\.cuda"""
)


def modules(*rooms: str) -> Iterator[Path]:
    for room in rooms:
        yield from sorted((ROOT / room).rglob("*.py"))


def imports(path: Path) -> set[str]:
    return imports_in(path.read_text(), path)


def imports_in(text: str, path: Path) -> set[str]:
    """Every module a file names in an import, relative ones made absolute, wherever in the file it stands."""
    package = ["minisgl", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("minisgl")}


def stage_of(module: str) -> int | None:
    found = re.match(r"minisgl\.stage(\d+)", module)
    return int(found[1]) if found else None


def test_relative_imports_are_seen() -> None:
    """The reader of imports must not be blind to the other spelling."""
    path = ROOT / "stage4" / "not_there.py"
    assert imports_in("from ..stage5 import scheduler", path) == {"minisgl.stage5", "minisgl.stage5.scheduler"}


def test_library_and_core_know_no_stage() -> None:
    wrong = {p.name: m for p in modules(*LIBRARY, "core") for m in imports(p) if stage_of(m)}
    assert not wrong, f"the library knows a stage: {wrong}"


@pytest.mark.parametrize("number", STAGES)
def test_stage_knows_only_its_past(number: int) -> None:
    for path in modules(f"stage{number}"):
        for module in imports(path):
            assert (stage_of(module) or 0) <= number, f"{path.name} of stage {number} imports {module}"


@pytest.mark.parametrize("number", STAGES)
def test_stage_has_its_own_loop(number: int) -> None:
    source = ROOT / f"stage{number}" / "llm.py"
    others = {m for m in imports(source) if re.fullmatch(r"minisgl\.stage\d+\.llm(\..*)?", m)}
    assert not others, f"stage {number} uses another stage's llm.py: {others}"
    names = {node.name for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)}
    assert names & {"_run", "serve"}, f"stage {number} has no loop in its llm.py"


@pytest.mark.parametrize("number", [1, 4, 7])  # a process start each
def test_running_a_stage_loads_no_later_one(number: int) -> None:
    code = f"import minisgl.stage{number}.llm, sys; print(*[m for m in sys.modules if m.startswith('minisgl.stage')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert max(filter(None, map(stage_of, loaded.stdout.split()))) == number


def test_device_is_asked_only_where_it_may_be() -> None:
    for path in modules("."):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(DEVICE_ROOMS) and not name.startswith(("benchmark/", "viz/", "learn/")):
            asked = DEVICE_QUESTION.search(path.read_text())
            assert not asked, f"{name} asks which device it is: {asked and asked[0]!r}"


def test_every_module_states_its_job() -> None:
    for path in modules("."):
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc, f"{path.relative_to(ROOT)} has no docstring"


def test_files_and_functions_stay_small() -> None:
    """About 150 lines and about 30: these are the limits past which something wants its own room."""
    for path in modules("."):
        text = path.read_text()
        assert text.count("\n") <= 260, f"{path.relative_to(ROOT)} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= 50, f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"


def test_nothing_unsafe_reads_what_comes_from_outside() -> None:
    unsafe = re.compile(r"import pickle|pickle\.loads|torch\.load\(|shell=True|yaml\.load\(|jinja2\.Environment\(")
    for path in modules("."):
        found = unsafe.search(path.read_text())
        assert not found, f"{path.relative_to(ROOT)}: {found and found[0]!r}"


def test_a_setting_is_a_flag() -> None:
    """The environment is handed on to children, and asked for nothing but where caches and tools are."""
    allowed = {"MINISGL_MINE", "XDG_CACHE_HOME", "CUDA_HOME", "CC", "PYTHONPATH"}
    for path in modules("."):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if name.startswith("learn/"):
            continue
        asked = set(re.findall(r"""(?:environ(?:\.get\(|\[)|getenv\()["'](\w+)|["'](\w+)["'] in os\.environ""", text))
        names = {one or other for one, other in asked}
        assert names <= allowed, f"{name} has a hidden switch: {names - allowed}"
        assert not re.search(r"(environ(\.get\(|\[)|getenv\()[^\"'\s]", text), f"{name} asks for a name that is made"


@pytest.mark.parametrize("owner", [SamplingParams, Context, ModelConfig, Config])
def test_what_is_handed_around_does_not_change(owner: Any) -> None:
    assert owner.__dataclass_params__.frozen
