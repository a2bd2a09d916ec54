"""A figure for each step, and a slider to walk through them. Knows nothing of what they show.

With a live kernel it is a widget; without one (a built notebook, a plain script) it is the picture of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from minisgl.viz.style import png


class StepSlider:
    """Shown by a notebook as what its front end can show: the widget, or else the picture of step `start`."""

    def __init__(self, draw: Callable[[int], Figure], steps: int, start: int) -> None:
        self._draw, self.steps, self.start = draw, steps, start
        self._pictures: dict[int, bytes] = {}

    def picture(self, step: int) -> bytes:
        """A PNG; each step is drawn once. Raises ValueError for a step that there is not."""
        if not 0 <= step < self.steps:
            raise ValueError(f"step must be from 0 to {self.steps - 1}, not {step}")
        if step not in self._pictures:
            self._pictures[step] = png(self._draw(step))
        return self._pictures[step]

    def widget(self) -> Any:
        """An ipywidgets box: a slider above a picture."""
        import ipywidgets

        image = ipywidgets.Image(value=self.picture(self.start), format="png", layout={"max_width": "100%"})
        slider = ipywidgets.IntSlider(
            self.start, 0, self.steps - 1, description="step", continuous_update=False, layout={"width": "70%"}
        )

        def show(change: Any) -> None:
            image.value = self.picture(change["new"])

        slider.observe(show, "value")
        return ipywidgets.VBox([slider, image])

    def _repr_mimebundle_(self, **_: Any) -> Any:
        """Both where there is a kernel: front ends take the richest form that they know."""
        from base64 import b64encode

        bundle = {"image/png": b64encode(self.picture(self.start)).decode(), "text/plain": repr(self)}
        if not _kernel_is_live():
            return bundle
        widget = self.widget()._repr_mimebundle_()
        return {**widget, **bundle}

    def __repr__(self) -> str:
        return f"<{self.steps} steps; here without a live kernel: step {self.start}>"


def slider(
    figures: Sequence[Figure] | Callable[[int], Figure], steps: int | None = None, start: int = -1
) -> StepSlider:
    """figures: one for each step, or a function that draws step i (of `steps`), which is called when it is wanted.
    start: the step shown first, from the end if negative."""
    if callable(figures):
        if steps is None or steps < 1:
            raise ValueError(f"a function needs steps, how many there are, at least 1: not {steps}")
        draw, number = figures, steps
    else:
        draw, number = figures.__getitem__, len(figures)
        if number == 0 or steps not in (None, number):
            raise ValueError(
                f"{number} figures were given and steps is {steps}: give at least one figure, and no steps"
            )
    if not -number <= start < number:
        raise ValueError(f"start must be from {-number} to {number - 1}, not {start}")
    return StepSlider(draw, number, start % number)


def _kernel_is_live() -> bool:
    """Also False where ipywidgets is not installed."""
    try:
        import ipywidgets  # noqa: F401
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    return shell is not None and getattr(shell, "kernel", None) is not None
