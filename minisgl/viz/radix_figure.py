"""The tree of cached prefixes: what each node holds, who locked it, when it was used, and what goes next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from minisgl.viz import units
from minisgl.viz.radix_steps import TreeNode, TreeSnapshot, snapshot_tree
from minisgl.viz.style import (
    GREY,
    INK,
    LOOKS,
    PALETTE,
    SMALLEST,
    WARNING,
    Size,
    legend,
    new_figure,
    printable,
    styled,
    swatch,
    text_on,
    text_width,
)

if TYPE_CHECKING:
    from minisgl.stage4.radix_cache import RadixCache

_OLD, _RECENT = (0.95, 0.96, 0.97), (0.55, 0.76, 0.90)
_USED, _NEW = PALETTE[2], PALETTE[3]
_BOX = 0.8  # of a column's width


@styled
def radix_tree(
    tree: RadixCache | TreeSnapshot,
    decode: Callable[[list[int]], str] | None = None,
    *,
    title: str | None = None,
    size: Size = "notebook",
) -> Figure:
    """decode: ids to text, such as a tokenizer's; None shows the ids."""
    snapshot = tree if isinstance(tree, TreeSnapshot) else snapshot_tree(tree)
    places = _places(snapshot)
    leaves = max(1, sum(1 for node in snapshot.nodes() if not node.children))
    depth = max((x for x, _ in places.values()), default=0) + 1
    figure, (axes,) = new_figure(
        size, title or snapshot.finding or _finding(snapshot), tall=max(0.55, 0.3 + leaves / 8)
    )
    row = (figure.get_figheight() * 0.72) / leaves
    column = (LOOKS[size].width - 0.3) / (depth + 0.45)
    font = min(LOOKS[size].font * 0.92, row * 0.8 * 72 / 4.1)
    shades = {time: i for i, time in enumerate(sorted({node.timestamp for node in snapshot.nodes()}))}
    goes = snapshot.next_to_go()
    _root(axes, (leaves - 1) / 2, font)
    for key, (x, y) in places.items():
        node, parent = key
        origin = (x - 1 + _BOX, places[parent][1]) if parent in places else (-0.12, (leaves - 1) / 2)
        color = {"used": _USED, "new": _NEW}.get(node.mark, GREY)
        middle = (origin[0] + x) / 2
        axes.plot(
            [origin[0], middle, middle, x],
            [origin[1], origin[1], y, y],
            color=color,
            linewidth=1 + bool(node.mark) * 1.5,
        )
        _node(axes, node, (x, y), shades[node.timestamp] / max(1, len(shades) - 1), node is goes)
        if font >= SMALLEST:
            _label(axes, node, (x, y), font, column * _BOX * 0.92, decode)
    axes.set_xlim(-0.47, depth - 1 + _BOX + 0.03)
    axes.set_ylim(leaves - 0.45, -0.55)
    axes.set_axis_off()
    legend(figure, size, _entries(snapshot))
    return figure


_Key = tuple[TreeNode, object]  # a node and its parent's key; nodes alike in all their values stand at other places


def _places(snapshot: TreeSnapshot) -> dict[_Key, tuple[float, float]]:
    """Leaves on lines of their own, parents in the middle of their children; x is the depth."""
    places: dict[_Key, tuple[float, float]] = {}
    line = 0

    def place(node: TreeNode, parent: object, depth: int) -> float:
        nonlocal line
        key = (node, parent)
        places[key] = (depth, 0.0)
        ys = [place(child, key, depth + 1) for child in node.children]
        if not ys:
            ys, line = [line], line + 1
        places[key] = (depth, (ys[0] + ys[-1]) / 2)
        return places[key][1]

    for root in snapshot.roots:
        place(root, None, 0)
    return places


def _root(axes: Axes, y: float, font: float) -> None:
    axes.plot([-0.12], [y], marker="o", color=INK, markersize=7)
    axes.text(-0.19, y, "root", ha="right", va="center", fontsize=max(font, SMALLEST))


def _node(axes: Axes, node: TreeNode, at: tuple[float, float], recent: float, goes: bool) -> None:
    x, y = at
    color = tuple(a + (b - a) * recent for a, b in zip(_OLD, _RECENT, strict=True))
    edge = WARNING if goes else INK if node.ref_count else GREY
    box = FancyBboxPatch((x, y - 0.4), _BOX, 0.8, boxstyle="round,pad=0,rounding_size=0.04", mutation_aspect=2)
    box.set(facecolor=color, edgecolor=edge, linewidth=2.6 if goes or node.ref_count else 0.8)
    box.set_linestyle("--" if goes else "-")
    axes.add_patch(box)


def _label(
    axes: Axes,
    node: TreeNode,
    at: tuple[float, float],
    font: float,
    width: float,
    decode: Callable[[list[int]], str] | None,
) -> None:
    x, y = at
    ids = list(node.tokens)
    text = printable(decode(ids)) if decode else " ".join(map(str, ids))
    lines = [text, units.count(len(ids), "token"), f"{units.count(node.ref_count, 'lock')}, used at {node.timestamp}"]
    shown = "\n".join(_cut(line, width, font) for line in lines)
    axes.text(
        x + _BOX / 2,
        y,
        shown,
        ha="center",
        va="center",
        fontsize=font,
        color=text_on(to_hex(_RECENT)),
        linespacing=1.15,
    )


def _cut(text: str, width: float, font: float) -> str:
    """As much of it as fits in `width` inches."""
    text = text[: int(width * 72 / font * 3)]  # no letter is narrower than a third of its height
    whole = text_width(text, font)
    if whole <= width:
        return text
    text = text[: int(len(text) * width / whole)]
    while text and text_width(text + "…", font) > width:
        text = text[:-1]
    return text + "…"


def _entries(snapshot: TreeSnapshot) -> list[tuple[str, Artist]]:
    nodes = list(snapshot.nodes())
    entries: list[tuple[str, Artist]] = [
        ("used long ago", swatch(to_hex(_OLD), edgecolor=GREY)),
        ("used just now", swatch(to_hex(_RECENT), edgecolor=GREY)),
    ]
    if any(node.ref_count for node in nodes):
        entries.append(("locked", swatch("white", edgecolor=INK, linewidth=2.6)))
    if snapshot.next_to_go():
        entries.append(("next to go", swatch("white", edgecolor=WARNING, linewidth=2.6, linestyle="--")))
    names = {"used": ("path of this step", _USED), "new": ("new in this step", _NEW)}
    entries += [
        (text, swatch(color)) for mark, (text, color) in names.items() if any(node.mark == mark for node in nodes)
    ]
    return entries


def _finding(snapshot: TreeSnapshot) -> str:
    nodes = list(snapshot.nodes())
    total, locked = (sum(len(n.tokens) for n in nodes if n.ref_count >= least) for least in (0, 1))
    return f"{units.count(len(nodes), 'node')} hold {units.count(total, 'token')}, {locked} of them locked"
