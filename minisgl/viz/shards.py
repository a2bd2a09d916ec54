"""Which slice of the model and of the KV cache lives on which rank. From a model's shape, by the layers' own rule."""

from __future__ import annotations

from typing import Protocol

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from minisgl.layers.shard import RankHeads, shard_range
from minisgl.viz.style import Size, fit_labels, legend, new_figure, styled, swatch, text_on


class Shape(Protocol):
    """What is asked of a ModelConfig here."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


@styled
def shards(shape: Shape, tp: int, *, title: str | None = None, size: Size = "notebook") -> Figure:
    """tp: number of ranks. A bar for each dimension that is cut; one lane for each rank that holds a part of it."""
    ranks = [RankHeads(shape, rank, tp) for rank in range(tp)]
    q, kv = [own.q() for own in ranks], [own.kv() for own in ranks]
    mlp, vocab = ([shard_range(n, rank, tp) for rank in range(tp)] for n in (shape.intermediate_size, shape.vocab_size))
    dimensions = {"q heads": q, "KV heads and\nKV cache": kv, "MLP columns": mlp, "vocabulary": vocab}
    figure, rows = new_figure(size, title or _finding(shape, q, kv), len(dimensions), tall=0.75 + tp * 0.03)
    labels = [_draw(axes, name, ranges) for axes, (name, ranges) in zip(rows, dimensions.items(), strict=True)]
    entries: list[tuple[str, Artist]] = [(f"rank {rank}", swatch(_color(rank, tp))) for rank in range(tp)]
    legend(figure, size, entries)
    fit_labels(figure, labels)
    return figure


def _draw(axes: Axes, name: str, ranges: list[range]) -> list[tuple[Text, Rectangle]]:
    """Where several ranks hold the same units, their slices lie one below the other."""
    total, tp = max(units.stop for units in ranges), len(ranges)
    copies = max(
        sum(1 for other in ranges if other.start < units.stop and units.start < other.stop) for units in ranges
    )
    labels: list[tuple[Text, Rectangle]] = []
    for rank, units in enumerate(ranges):
        lane = rank % copies
        color = _color(rank, tp)
        box = Rectangle((units.start, lane), len(units), 1, facecolor=color, edgecolor="white", linewidth=1.5)
        axes.add_patch(box)
        text = f"{units.start:,}" if len(units) == 1 else f"{units.start:,} – {units.stop - 1:,}"
        middle = units.start + len(units) / 2
        labels.append((axes.text(middle, lane + 0.5, text, ha="center", va="center", color=text_on(color)), box))
    axes.set_xlim(0, total)
    axes.set_ylim(copies, 0)
    axes.set_yticks([copies / 2], [name])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return labels


def _color(rank: int, tp: int) -> str:
    """Of its own scale: requests have the palette."""
    return to_hex(colormaps["cividis"](rank / max(1, tp - 1) * 0.92))


def _finding(shape: Shape, q: list[range], kv: list[range]) -> str:
    ranks = "1 rank" if len(q) == 1 else f"{len(q)} ranks"
    text = f"{shape.num_heads} q heads on {ranks} are {_sum(q)}"
    if len(kv) > shape.num_kv_heads:
        return text + f", and {len(kv) // shape.num_kv_heads} ranks hold each of the {shape.num_kv_heads} KV heads"
    return text + f", and {shape.num_kv_heads} KV heads {_sum(kv)}"


def _sum(ranges: list[range]) -> str:
    sizes = [str(len(units)) for units in ranges]
    return f"{sizes[0]} each" if len(set(sizes)) == 1 < len(sizes) else " + ".join(sizes)
