"""Every notebook runs from its source, and the committed one is that source, run. Knows nothing of what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
SOURCES = [pytest.param(source, id=source.stem) for source in sorted(FOLDER.glob("*.py"))]
SECONDS = 240  # a cell, on a machine that does other things too


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_it_runs_from_top_to_bottom(source: Path) -> None:
    notebook = jupytext.read(source)
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(FOLDER)}}).execute()
    assert figures(notebook)


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_committed_is_the_source_run(source: Path) -> None:
    built = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    remedy = f"build it again, in notebooks/: jupytext --to ipynb --execute {source.name}"
    assert texts(built) == texts(jupytext.read(source)), remedy
    assert all(cell.execution_count for cell in built.cells if cell.cell_type == "code"), remedy
    assert not [output for output in outputs(built) if output.output_type == "error"], remedy
    assert figures(built), remedy


def texts(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def outputs(notebook: Any) -> Iterator[Any]:
    for cell in notebook.cells:
        yield from cell.get("outputs", [])


def figures(notebook: Any) -> list[Any]:
    return [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
