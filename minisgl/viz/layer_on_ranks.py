"""What each rank computes in one decoder layer, and where they meet. From a model's shape, by the layers' own rule.

The products with weights alone, by their multiply-adds. Attention over the cache comes on top, in the same shares.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from minisgl.layers.shard import RankHeads, shard_range
from minisgl.viz.shards import Shape
from minisgl.viz.style import (
    INK,
    PALETTE,
    WARNING,
    Size,
    few_ticks,
    fit_labels,
    legend,
    new_figure,
    styled,
    swatch,
    text_on,
)
from minisgl.viz.units import count, share

_COLORS = {"q, k, v": PALETTE[0], "o": PALETTE[4], "gate, up": PALETTE[2], "down": PALETTE[3]}


class LayerShape(Shape, Protocol):
    @property
    def hidden_size(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class _Half(NamedTuple):
    """What a rank computes before an all-reduce: multiply-adds of a token, in millions."""

    products: dict[str, float]

    @property
    def length(self) -> float:
        return sum(self.products.values())


@styled
def layer_on_ranks(shape: LayerShape, tp: int, *, title: str | None = None, size: Size = "notebook") -> Figure:
    """tp: number of ranks. A lane for each; whoever is done waits at the all-reduce for the others."""
    halves = [_halves(shape, rank, tp) for rank in range(tp)]
    paces = [max(half.length for half in same) for same in zip(*halves, strict=True)]
    waits = any(half.length < pace for own in halves for half, pace in zip(own, paces, strict=True))
    figure, (axes,) = new_figure(size, title or _finding(shape, tp, sum(paces), waits), tall=min(1.3, 0.5 + 0.09 * tp))
    start = 0.0
    labels: list[tuple[Text, Rectangle]] = []
    for index, pace in enumerate(paces):
        for rank in range(tp):
            at = start
            for name, length in halves[rank][index].products.items():
                box = Rectangle((at, rank - 0.4), length, 0.8, facecolor=_COLORS[name], edgecolor="white")
                axes.add_patch(box)
                middle = (at + length / 2, rank)
                labels.append((axes.text(*middle, name, ha="center", va="center", color=text_on(_COLORS[name])), box))
                at += length
            axes.add_patch(Rectangle((at, rank - 0.4), start + pace - at, 0.8, facecolor=WARNING, alpha=0.28))
        start += pace
        if tp > 1:
            axes.vlines(start, -0.5, tp - 0.5, color=INK, linewidth=3)
    axes.set_xlim(0, 1.01 * start)
    axes.set_ylim(tp - 0.4, -0.6)
    axes.set_yticks(range(tp), [f"rank {rank}" for rank in range(tp)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("million multiply-adds of a token")
    few_ticks(axes.xaxis, whole=False)
    entries: list[tuple[str, Artist]] = [(name, swatch(color)) for name, color in _COLORS.items()]
    if tp > 1:
        entries.append((f"all-reduce: {count(shape.hidden_size, 'value')} a token", swatch(INK)))
    if waits:
        entries.append(("waits for a fuller rank", swatch(WARNING, alpha=0.28)))
    legend(figure, size, entries)
    fit_labels(figure, [[label] for label in labels])
    return figure


def _halves(shape: LayerShape, rank: int, tp: int) -> tuple[_Half, _Half]:
    own, columns = RankHeads(shape, rank, tp), len(shard_range(shape.intermediate_size, rank, tp))
    q, kv = len(own.q()) * shape.head_dim, len(own.kv()) * shape.head_dim
    million = shape.hidden_size / 1e6
    attention = {"q, k, v": (q + 2 * kv) * million, "o": q * million}
    return _Half(attention), _Half({"gate, up": 2 * columns * million, "down": columns * million})


def _finding(shape: LayerShape, tp: int, pace: float, waits: bool) -> str:
    whole = sum(half.length for half in _halves(shape, 0, 1))
    text = f"A layer takes {share(pace, whole)} of its products' time on {count(tp, 'rank')}"
    if tp == 1:
        return text
    copied = f", and K and V are computed {count(tp // shape.num_kv_heads)} times" if tp > shape.num_kv_heads else ""
    return f"{text}, and 2 all-reduces{copied}" + (": the fullest rank sets the pace" if waits else "")
