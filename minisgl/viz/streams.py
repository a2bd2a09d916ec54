"""When each token of a stream came: a stall is where its line is flat. From times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.figure import Figure

from minisgl.viz import units
from minisgl.viz.style import PALETTE, Size, few_ticks, legend, new_figure, styled

_DASHES = ("-", "--", ":", "-.")


@styled
def token_times(times: Mapping[str, Sequence[float]], *, title: str | None = None, size: Size = "notebook") -> Figure:
    """How many tokens a stream has by when. times: name -> the moment of each of its tokens, in order; seconds since
    anything that is the same for all."""
    if not times or not all(len(moments) > 1 for moments in times.values()):
        raise ValueError("times must give at least two tokens for each name")
    start = min(moments[0] for moments in times.values())
    unit = units.time_unit(max(moments[-1] for moments in times.values()) - start)
    figure, (axes,) = new_figure(size, title or _finding(times))
    for index, (name, moments) in enumerate(times.items()):
        axes.step(
            [(moment - start) / unit.scale for moment in moments],
            range(1, len(moments) + 1),
            _DASHES[index % len(_DASHES)],
            where="post",
            color=PALETTE[index % len(PALETTE)],
            label=name,
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"time ({unit.name})")
    axes.set_ylabel("tokens of the answer")
    axes.grid()
    few_ticks(axes.xaxis, whole=False)
    few_ticks(axes.yaxis)
    legend(figure, size, [(str(line.get_label()), line) for line in axes.get_lines()])
    return figure


def _finding(times: Mapping[str, Sequence[float]]) -> str:
    longest = {name: max(later - earlier for earlier, later in pairwise(moments)) for name, moments in times.items()}
    return "The longest wait for a token: " + ", ".join(f"{units.duration(s)} ({name})" for name, s in longest.items())
