"""From logits to a token: which tokens compete, before and after temperature and filters. The library filters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from torch import Tensor

from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.sampling.sampler import Sampler
from minisgl.viz import units
from minisgl.viz.style import GREY, PALETTE, Size, few_ticks, legend, new_figure, printable, styled, swatch


@styled
def logits_to_token(
    logits: Tensor,
    params: SamplingParams,
    decode: Callable[[list[int]], str],
    *,
    chosen: int | None = None,
    top: int = 12,
    title: str | None = None,
    size: Size = "notebook",
) -> Figure:
    """Probabilities of the likeliest tokens, as the model gave them and as they are drawn. logits: [vocab], of one
    position. decode: ids to text. chosen: the id that was drawn, to mark."""
    if logits.dim() != 1 or top < 1:
        raise ValueError(f"logits must be [vocab] and top at least 1, not {list(logits.shape)} and {top}")
    before, after = logits.float().softmax(0), probabilities(logits, params)
    ids = before.topk(min(top, len(before))).indices.tolist()
    if chosen is not None and chosen not in ids:
        ids[-1] = chosen
    kept = int((after > 0).sum())
    figure, (axes,) = new_figure(size, title or _finding(params, after, kept, decode), tall=0.55 + len(ids) / 24)
    for offset, values, color in ((-0.2, before, GREY), (0.2, after, PALETTE[0])):
        ys = [row + offset for row in range(len(ids) + 1)]
        rest = max(0.0, 1 - float(values[ids].sum()))
        axes.barh(ys, [*(100 * values[ids]).tolist(), 100 * rest], 0.38, color=color)
    names = [printable(decode([i])) + (" ← drawn" if i == chosen else "") for i in ids]
    axes.set_yticks(range(len(ids) + 1), [*names, f"{len(before) - len(ids):,} others"])
    axes.set_ylim(len(ids) + 0.6, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("probability (%)")
    axes.set_ylabel("token")
    axes.grid(axis="x")
    few_ticks(axes.xaxis, whole=False)
    entries: list[tuple[str, Artist]] = [
        ("softmax of the logits", swatch(GREY)),
        (_settings(params), swatch(PALETTE[0])),
    ]
    legend(figure, size, entries)
    return figure


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """float32 [vocab], what a token is drawn with: by the sampler's own temperature, filters and order."""
    if params.is_greedy:
        return torch.zeros(len(logits)).index_fill_(0, logits.max(0).indices.cpu(), 1.0)
    sampler = Sampler(len(logits), logits.device)
    args = sampler.prepare([Req(0, torch.zeros(1, dtype=torch.int32), replace(params, seed=0), 0)])
    args = args.apart.args if args.apart else args
    assert args.temperatures is not None
    return sampler.filters.apply(logits.float()[None] / args.temperatures[:, None], args)[0].softmax(0)


def _settings(params: SamplingParams) -> str:
    if params.is_greedy:
        return "drawn with: the likeliest token always (temperature 0)"
    names = {"top-k": params.top_k if params.top_k > 0 else "", "top-p": params.top_p if params.top_p < 1 else ""}
    names["min-p"] = params.min_p if params.min_p > 0 else ""
    return f"drawn with: temperature {params.temperature:g}" + "".join(
        f", {n} {v}" for n, v in names.items() if v != ""
    )


def _finding(params: SamplingParams, after: Tensor, kept: int, decode: Callable[[list[int]], str]) -> str:
    best = int(after.argmax())
    name = printable(decode([best]))
    if params.is_greedy:
        return f"Temperature 0 always takes the likeliest token, “{name}”"
    filters = f"{units.count(kept)} of {units.count(len(after), 'token')} may be drawn"
    return f"{filters}, “{name}” with {100 * float(after[best]):.0f} %"
