"""`python -m minisgl.viz`, the slider with and without a kernel, and an installation without matplotlib."""

from __future__ import annotations

import os
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace

import pytest
from inputs import alone_trace, launched, layers_of_ranks, server_trace
from matplotlib.figure import Figure

from minisgl import viz
from minisgl.core.trace import Event
from minisgl.viz.__main__ import FIGURES, main
from minisgl.viz.slider import StepSlider

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG"


def write_part(path: Path, events: list[Event]) -> Path:
    """As the processes of a run do."""
    import json

    for role, rank in {(event.role or "main", event.rank) for event in events}:
        own = [event for event in events if (event.role or "main", event.rank) == (role, rank)]
        part = path.with_name(f"{path.name}.{role}{rank}.jsonl")
        part.write_text("".join(json.dumps(event.to_part()) + "\n" for event in own))
    return path


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_from_the_command_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = alone_trace(True)
    events = {
        "triangle": alone,
        "time-per-token": alone,
        "launches": launched(9, False),
        "recorded-layers": layers_of_ranks(),
    }
    trace = write_part(tmp_path / "run.json", events.get(name, server_trace()))
    out = tmp_path / "out.png"
    assert main([str(trace), "--figure", name, "-o", str(out), "--size", "small"]) == 0
    assert out.read_bytes().startswith(PNG)
    assert capsys.readouterr().out.strip() == str(out)


def test_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FIGURES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "--figure", "gantt"], "no trace at missing.json"),
        (["missing.json"], "name a trace and a figure"),
        (["missing.json", "--figure", "pie"], "invalid choice: 'pie'"),
        (["missing.json", "--figure", "gantt", "-o", "out.docx"], "must end with one of .png .svg .pdf"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_trace_without_what_a_figure_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_part(tmp_path / "run.json", server_trace())
    with pytest.raises(SystemExit):
        main([str(trace), "--figure", "triangle"])
    assert "record it with stage 1 or 2" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = write_part(tmp_path / "run.json", server_trace()), tmp_path / "none" / "x.png"
    with pytest.raises(SystemExit) as error:
        main([str(trace), "--figure", "gantt", "-o", str(out)])
    assert error.value.code == 2
    assert f"cannot write {out} (No such file or directory): name with -o" in capsys.readouterr().err.splitlines()[-1]


def test_without_matplotlib_the_extra_is_named() -> None:
    code = "import sys; sys.modules['matplotlib'] = None\nimport minisgl.viz"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ImportError: figures need matplotlib: pip install 'minisgl[notebooks]'" in done.stderr


def test_the_command_without_matplotlib_says_one_line(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "minisgl.viz", "--list"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "figures need matplotlib: python3 dev/setup.py notebooks\n"


def draw_step(step: int) -> Figure:
    return viz.batch_composition(server_trace(), step=step + 1, size="small")


def test_slider_without_a_kernel_is_a_picture() -> None:
    bundle = viz.slider(draw_step, 6, start=2)._repr_mimebundle_()
    assert set(bundle) == {"image/png", "text/plain"}
    assert b64decode(bundle["image/png"]) == viz.style.png(draw_step(2))
    assert "step 2" in bundle["text/plain"]


def test_slider_with_a_kernel_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))
    steps = viz.slider(draw_step, 6)
    bundle = steps._repr_mimebundle_()
    assert {"image/png", "text/plain", "application/vnd.jupyter.widget-view+json"} == set(bundle)
    bar, image = steps.widget().children
    assert image.value == steps.picture(5)
    bar.value = 0
    assert image.value == steps.picture(0) != steps.picture(5)


def test_slider_of_figures() -> None:
    figures = [draw_step(0), draw_step(1)]
    steps = viz.slider(figures)
    assert isinstance(steps, StepSlider)
    assert steps.picture(1) == viz.style.png(figures[1])
    with pytest.raises(ValueError, match="from 0 to 1, not 2"):
        steps.picture(2)
    with pytest.raises(ValueError, match="at least one figure"):
        viz.slider([])
    with pytest.raises(ValueError, match="needs steps"):
        viz.slider(draw_step)
    with pytest.raises(ValueError, match="start must be from -2 to 1"):
        viz.slider(figures, start=2)


def test_a_notebook_shows_a_figure_as_it_is_saved() -> None:
    figure = draw_step(0)
    assert figure._repr_png_() == viz.style.png(figure)  # type: ignore[attr-defined]
