"""How every figure looks: sizes, colours, title, legend. Knows nothing of what is drawn.

Figures are made without pyplot, which would keep each of them alive, and show themselves in a notebook.
"""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, MaxNLocator

P = ParamSpec("P")
R = TypeVar("R")

Size = Literal["small", "notebook", "projector"]

# Okabe and Ito's colours, which the colour-blind can tell apart, less black and the yellow that white swallows.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
INK, GREY, PALE, WARNING = "#222222", "#8C8C8C", "#E4E4E4", "#D55E00"
HATCH = "////"
SMALLEST = 4.5  # points: what would be smaller is left out


class _Look(NamedTuple):
    width: float  # inches
    height: float
    font: float  # points
    dpi: int = 100


LOOKS: dict[Size, _Look] = {
    "small": _Look(5.6, 3.7, 7.5),
    "notebook": _Look(9.5, 4.8, 10.5),
    "projector": _Look(13.3334, 7.5, 16.0, dpi=144),  # 1920 by 1080
}


class Drawing(Figure):
    """A Figure that a notebook shows, as it is saved: nothing cut off or added."""

    def _repr_png_(self) -> bytes:
        return png(self)


def png(figure: Figure) -> bytes:
    """The same bytes for the same figure."""
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """For each function that draws: matplotlib's settings are ours while it runs. Its keyword `size` picks them."""

    @functools.wraps(draw)
    def styled_draw(*args: P.args, **kwargs: P.kwargs) -> R:
        size = kwargs.get("size", "notebook")
        if size not in LOOKS:
            raise ValueError(f"size must be one of {', '.join(LOOKS)}, not {size!r:.80}")
        with rc_context(_settings(LOOKS[size])):
            return draw(*args, **kwargs)

    return styled_draw


def _settings(look: _Look) -> Any:
    font = look.font
    sizes = dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), font * 0.92)
    lines = {"axes.linewidth": font / 13, "lines.linewidth": font / 5, "hatch.linewidth": font / 12}
    flags = {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "text.parse_math": False}
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    return {
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
        "font.size": font,
        "axes.labelsize": font,
        "axes.titlesize": font,
        "axes.titlelocation": "left",
        "axes.edgecolor": GREY,
        "grid.color": PALE,
        "hatch.color": "white",
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "legend.frameon": False,
        "figure.dpi": look.dpi,
        "savefig.dpi": "figure",
        **sizes,
        **lines,
        **flags,
        **colors,
    }


def new_figure(
    size: Size, title: str, panels: int = 1, tall: float = 1.0, beside: bool = False, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with as many axes, one below the other or beside it. tall: times the usual height; a slide has its
    own, always."""
    look = LOOKS[size]
    height = look.height * (1.0 if size == "projector" else tall)
    spaces = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, hspace=0.04)  # inches, and a share of the height
    figure = Drawing(figsize=(look.width, height), layout=spaces)
    font = look.font * 1.2
    lines = wrap(title, look.width - 0.3, font, bold=True)
    figure.suptitle("\n".join(lines), x=0.012, ha="left", fontsize=font, fontweight="bold")
    axes = figure.subplots(*((1, panels) if beside else (panels, 1)), squeeze=False, **options)
    return figure, list(axes.flat)


def legend(figure: Figure, size: Size, entries: Sequence[tuple[str, Artist]]) -> None:
    """Below the axes, in as many columns as there is room for."""
    look = LOOKS[size]
    font = look.font * 0.92
    widest = max(text_width(label, font) for label, _ in entries) + 4.2 * font / 72
    rows = -(-len(entries) // max(1, int((look.width - 0.2) / widest)))
    columns = -(-len(entries) // rows)
    labels, handles = [label for label, _ in entries], [artist for _, artist in entries]
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, columnspacing=1.4, handlelength=1.8)


def swatch(color: str, **options: Any) -> Patch:
    return Patch(**{"facecolor": color, "edgecolor": "none", **options})


def request_color(uid: int) -> str:
    """The request's colour in every figure. After six the colours come lighter, then darker, then again."""
    color, turn = np.array(to_rgb(PALETTE[uid % len(PALETTE)])), uid // len(PALETTE) % 3
    shade = (color, color * 0.5 + 0.5, color * 0.58)[turn]
    return to_hex((shade[0], shade[1], shade[2]))


def request_entries(uids: Sequence[int], most: int = 12) -> list[tuple[str, Artist]]:
    """Legend entries, lowest uid first."""
    shown = sorted(set(uids))
    entries: list[tuple[str, Artist]] = [(f"request {uid}", swatch(request_color(uid))) for uid in shown[:most]]
    if len(shown) > most:
        entries.append((f"… and {len(shown) - most} more", swatch("white")))
    return entries


def text_on(color: str) -> str:
    """Ink or white, whichever is readable on the colour."""
    red, green, blue = to_rgb(color)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else INK


def text_width(text: str, font: float, bold: bool = False) -> float:
    """Inches."""
    if not text.strip():
        return 0.0
    properties = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    return TextPath((0, 0), text, size=font, prop=properties, usetex=False).get_extents().width / 72


def wrap(text: str, width: float, font: float, bold: bool = False) -> list[str]:
    """Lines of at most `width` inches, about as long as each other."""
    most = max(12, int(width * 0.94 * max(1, len(text)) / max(0.01, text_width(text, font, bold))))
    lines = textwrap.wrap(text, most) or [""]
    while most > 12 and len(narrower := textwrap.wrap(text, most - 1)) == len(lines) > 1:
        lines, most = narrower, most - 1
    return lines


def printable(text: str) -> str:
    """A token's text with spaces and control characters made visible, and what the font lacks as its code."""
    glyphs = get_font(findfont("DejaVu Sans"))
    shown = repr(text.replace(" ", "␣"))[1:-1]
    return "".join(c if glyphs.get_char_index(ord(c)) else f"U+{ord(c):04X}" for c in shown)


def fit_labels(figure: Figure, groups: Sequence[Sequence[tuple[Text, Rectangle]]]) -> None:
    """Texts inside boxes are extras: a group that is a little too large for its boxes is made smaller, one that is much
    too large is left out. Call it when everything else is there."""
    figure.draw_without_rendering()
    for group in groups:
        scale = 1.0
        for text, box in group:
            inner, outer = text.get_window_extent(), box.get_window_extent()
            scale = min(scale, 0.94 * outer.width / inner.width, 0.96 * outer.height / inner.height)
        for text, _ in group:
            font = float(text.get_fontsize()) * scale
            text.set_fontsize(font)
            text.set_visible(scale >= 0.6 and font >= SMALLEST)


def few_ticks(axis: Axis, whole: bool = True, most: int = 8) -> None:
    """Round numbers, few enough for their labels to stand side by side."""
    axis.set_major_locator(MaxNLocator(nbins=most, integer=whole, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
