"""Every figure can be read at every size: nothing over anything else, nothing cut off, everything named."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxes import problems
from inputs import FIGURES, server_trace
from matplotlib.figure import Figure
from tiny_model import make_tiny_model

from minisgl import viz
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Event, read_events
from minisgl.viz.style import LOOKS, png, request_color

SIZES = list(LOOKS)


@pytest.fixture(scope="module", params=[5, 7])
def real_trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """Seven requests through four rows, their lengths all different, some with a prefix in common."""
    folder = tmp_path_factory.mktemp("real")
    llm_class = importlib.import_module(f"minisgl.stage{request.param}.llm").LLM
    prompts = [[*([7] * 16 if uid % 2 else []), *range(uid, 3 * uid + 5)] for uid in range(7)]
    params = [SamplingParams(max_tokens=4 + 2 * uid, ignore_eos=True) for uid in range(7)]
    options = {"page_size": 4, "num_pages": 64, "max_running_requests": 4, "max_prefill_length": 32, "threads": 1}
    model = str(make_tiny_model(folder / "model"))
    with llm_class(model, trace=str(folder / "trace.json"), dtype="float32", **options) as llm:
        llm.generate(prompts, params)
    return read_events(folder / "trace.json")


def check(figure: Figure) -> None:
    assert not problems(figure)
    assert figure.get_suptitle().strip()
    for axes in figure.axes:
        if axes.axison:
            units = [axis.get_label_text() for axis in (axes.xaxis, axes.yaxis) if len(axis.get_majorticklocs())]
            labels = [label.get_text() for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
            assert any(units) or any(labels), "axes that are not named"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FIGURES)
def test_made_up(name: str, size: str) -> None:
    figure = FIGURES[name](size)
    check(figure)
    if size == "projector":
        width, height = figure.get_size_inches() * figure.dpi
        assert (round(width), round(height)) == (1920, 1080)


@pytest.mark.parametrize("size", SIZES)
def test_real_runs(real_trace: list[Event], size: viz.style.Size) -> None:
    check(viz.gantt(real_trace, size=size))
    check(viz.batch_composition(real_trace, step=3, size=size))
    check(viz.timeline(real_trace, size=size))
    check(viz.page_usage(real_trace, size=size))


def test_real_steps_add_up(real_trace: list[Event]) -> None:
    """Each request is drawn, and each of its tokens after the first is a token of some decode step."""
    assert {span.uid for span in viz.request_spans(real_trace)} == set(range(7))
    decoded = sum(step.decode for step in viz.steps(real_trace))
    assert decoded >= sum(3 + 2 * uid for uid in range(7))


def test_journey_of_an_aborted_request() -> None:
    """An Abort is sent twice, each time one process further."""
    events = [e for e in server_trace(1) if e.name != "Replies"]
    events += [
        Event("Abort", "i", events[-1].ts + i, "messages", 0, role=r) for i, r in enumerate(("main", "tokenizer"))
    ]
    figure = viz.journey(events, 0)
    check(figure)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "1 Tokenize\n1 Abort" in texts
    assert "1 Generate\n1 Abort" in texts


@pytest.mark.parametrize("size", SIZES)
def test_long_title_is_wrapped(size: viz.style.Size) -> None:
    check(viz.gantt(server_trace(), title="This run says a lot about scheduling " * 5, size=size))


def test_a_bad_figure_is_found() -> None:
    """The finder of problems must not be blind."""
    figure = FIGURES["gantt"]("notebook")
    figure.text(0.012, 0.97, "over the title")
    figure.text(0.99, 0.5, "leaves the figure")
    figure.axes[0].legend(["x"])
    figure.legends.append(figure.axes[0].get_legend())
    found = " ".join(problems(figure))
    assert "over the title' is over" in found or "is over 'over the title'" in found
    assert "leaves the figure" in found
    assert "the legend is over the data" in found


@pytest.mark.parametrize("name", ["gantt", "page table", "radix tree", "timeline"])
def test_the_same_every_time(name: str) -> None:
    assert png(FIGURES[name]("small")) == png(FIGURES[name]("small"))


def face_colors(figure: Figure) -> Iterator[tuple[float, ...]]:
    for axes in figure.axes:
        for patch in axes.patches:
            yield tuple(round(float(value), 3) for value in patch.get_facecolor()[:3])


def test_a_request_has_one_color_in_all_figures() -> None:
    from matplotlib.colors import to_rgb

    color = tuple(round(value, 3) for value in to_rgb(request_color(1)))
    for name in ("gantt", "page grid", "page table", "memory waste"):
        assert color in set(face_colors(FIGURES[name]("small"))), f"request 1 has another colour in {name}"
    assert len({request_color(uid) for uid in range(18)}) == 18


def test_sizes_have_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="small, notebook, projector, not 'huge'"):
        viz.gantt(server_trace(), size="huge")  # type: ignore[arg-type]
