"""Where memory goes: bytes of a cache, slots that nobody uses, the budget of a device. From numbers."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from minisgl.viz import units
from minisgl.viz.style import (
    GREY,
    HATCH,
    INK,
    PALE,
    PALETTE,
    Size,
    few_ticks,
    fit_labels,
    legend,
    new_figure,
    request_color,
    request_entries,
    styled,
    swatch,
    text_on,
)


@styled
def cache_bytes(
    bytes_per_token: Mapping[str, int],
    max_len: int,
    *,
    model_bytes: int | None = None,
    title: str | None = None,
    size: Size = "notebook",
) -> Figure:
    """How a sequence's KV cache grows. bytes_per_token: by name, to compare; model_bytes: a line to compare with."""
    if not bytes_per_token or max_len < 1:
        raise ValueError(f"needs at least one name -> bytes and a length of at least 1, not {max_len}")
    name, each = next(iter(bytes_per_token.items()))
    most = max(bytes_per_token.values()) * max_len
    full = units.size(each * max_len)
    finding = f"{name} keeps {units.size(each)} for each token: {units.count(max_len, 'token')} take {full}"
    figure, (axes,) = new_figure(size, title or finding)
    unit = units.byte_unit(most)
    for index, (label, cost) in enumerate(bytes_per_token.items()):
        axes.plot([0, max_len], [0, cost * max_len / unit.scale], color=PALETTE[index % len(PALETTE)], label=label)
    if model_bytes is not None:
        axes.axhline(
            model_bytes / unit.scale, color=INK, linestyle="--", label=f"the weights, {units.size(model_bytes)}"
        )
    axes.set_xlim(0, max_len)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("length of the sequence (tokens)")
    axes.set_ylabel(f"KV cache ({unit.name})")
    axes.grid()
    few_ticks(axes.xaxis, most=6)
    few_ticks(axes.yaxis, whole=False)
    legend(figure, size, [(str(line.get_label()), line) for line in axes.get_lines()])
    return figure


@styled
def memory_waste(
    lengths: Mapping[int, int], max_seq_len: int, page_size: int, *, title: str | None = None, size: Size = "notebook"
) -> Figure:
    """Slots that requests use, and slots that are kept for them and stay empty. lengths: uid -> its tokens."""
    if not lengths or max(lengths.values()) > max_seq_len:
        raise ValueError(
            f"lengths must name at least one request, and be at most {max_seq_len}: {dict(lengths)!r:.200}"
        )
    used = sum(lengths.values())
    paged = {uid: -(-length // page_size) * page_size for uid, length in lengths.items()}
    contiguous = dict.fromkeys(lengths, max_seq_len)
    shares = [units.share(sum(kept.values()) - used, sum(kept.values())) for kept in (contiguous, paged)]
    finding = f"Of contiguous slots {shares[0]} stay empty, of pages of {page_size} only {shares[1]}"
    figure, rows = new_figure(size, title or finding, 2, min(1.6, 0.62 + len(lengths) / 18), sharex=True)
    names = f"contiguous: {max_seq_len:,} slots for each request", f"paged: as many pages of {page_size} as are needed"
    for axes, kept, name in zip(rows, (contiguous, paged), names, strict=True):
        for row, (uid, length) in enumerate(lengths.items()):
            axes.barh(row, length, 0.75, color=request_color(uid), linewidth=0)
            axes.barh(row, kept[uid] - length, 0.75, left=length, color=PALE, hatch=HATCH, edgecolor=GREY, linewidth=0)
        axes.set_title(name)
        every = -(-len(lengths) // 8)
        axes.set_yticks(range(0, len(lengths), every), [str(uid) for uid in list(lengths)[::every]])
        axes.set_ylim(len(lengths) - 0.5, -0.5)
        axes.set_ylabel("request")
    rows[-1].set_xlim(0, max_seq_len)
    rows[-1].set_xlabel("slots")
    few_ticks(rows[-1].xaxis)
    empty = swatch(PALE, hatch=HATCH, edgecolor=GREY)
    legend(figure, size, [*request_entries(list(lengths)), ("kept, and empty", empty)])
    return figure


@styled
def memory_budget(
    parts: Mapping[str, int], *, pages: tuple[str, int] | None = None, title: str | None = None, size: Size = "notebook"
) -> Figure:
    """One bar of a device's memory. parts: name -> bytes, in order, together all that was free at the start.
    pages: which of the parts is cut into how many pages, for the title."""
    negative = {name: value for name, value in parts.items() if value < 0}
    if not parts or negative:
        raise ValueError(f"parts of memory must be at least 0 bytes and not none at all: {negative or dict(parts)}")
    total = sum(parts.values())
    name, value = max(parts.items(), key=lambda item: item[1])
    finding = f"{name}: {units.size(value)} of {units.size(total)}"
    if pages is not None:
        finding = f"{units.size(parts[pages[0]])} of {units.size(total)} are left for {units.count(pages[1], 'page')}"
    figure, (axes,) = new_figure(size, title or finding, tall=0.5)
    unit = units.byte_unit(total)
    left = 0.0
    colors = (PALETTE[0], PALETTE[2], PALETTE[3], PALETTE[4], PALETTE[1], PALE)
    entries, labels = [], []
    for index, (part, size_of_it) in enumerate(parts.items()):
        color = PALE if index == len(parts) - 1 else colors[index % 5]
        box = Rectangle((left, -0.4), size_of_it / unit.scale, 0.8, facecolor=color, edgecolor="white")
        axes.add_patch(box)
        middle = left + size_of_it / unit.scale / 2
        text = units.size(size_of_it)
        label: Text = axes.text(middle, 0, text, ha="center", va="center", color=text_on(color))
        labels.append((label, box))
        entries.append((f"{part}: {text}", swatch(color)))
        left += size_of_it / unit.scale
    axes.set_xlim(0, left)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"memory of the device ({unit.name})")
    few_ticks(axes.xaxis, whole=False)
    legend(figure, size, entries)
    fit_labels(figure, [[label] for label in labels])
    return figure


def budget_parts(
    memory_ratio: float, free_before: int, model_bytes: int, bytes_per_page: int
) -> tuple[dict[str, int], int]:
    """What `memory_budget` draws, by the engine's own rule (`pages_in_budget`): the parts, and the number of pages."""
    from minisgl.stage3.page_pool import KVCachePool

    pages = KVCachePool.pages_in_budget(memory_ratio, free_before, model_bytes, bytes_per_page)
    if pages < 0:
        raise ValueError(f"{units.size(model_bytes)} of weights do not fit {memory_ratio} of {units.size(free_before)}")
    parts = {"weights": model_bytes, "KV pages": pages * bytes_per_page, "dummy page": bytes_per_page}
    return {**parts, "left for activations": free_before - sum(parts.values())}, pages
