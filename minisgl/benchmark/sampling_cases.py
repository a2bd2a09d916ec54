"""The cases of `kernels` that choose tokens: greedy, drawn, drawn from what filters leave. Times nothing.

FlashInfer's four ways to draw, which mini-sglang's sampler takes, are beside ours. Its random numbers are those of a
row of the batch, and ours those of a request's seed and position; so the server draws with ours, whichever is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.kernel_cases import Case, Forms, Shape, requests
from minisgl.core.sampling_params import SamplingParams
from minisgl.kernel.triton_runs import triton_runs
from minisgl.sampling.sampler import Sampler

FILTERS: dict[str, dict[str, Any]] = {
    "sample_drawn": {},
    "sample_top_k": {"top_k": 50},
    "sample_top_p": {"top_p": 0.9},
    "sample_top_p_flat": {"top_p": 0.9, "spread": 1.0},
    "sample_top_k_top_p": {"top_k": 50, "top_p": 0.9},
}
_TEMPERATURE = 0.6


def greedy(s: Shape) -> Case:
    logits = s.random(s.batch, s.config.vocab_size)
    return Case(logits.nbytes, {"torch": lambda: logits.argmax(dim=1), **_ours(s, logits, SamplingParams())})


def drawn(s: Shape, spread: float = 3.0, **filters: Any) -> Case:
    """spread: the deviation of the logits. With 3 a nucleus has about a hundred of 150,000 tokens, as many as a model's
    may have; with 1 a third of them, the worst for a form that hopes for few."""
    logits = s.random(s.batch, s.config.vocab_size).mul_(spread)
    ours = _ours(s, logits, SamplingParams(temperature=_TEMPERATURE, seed=1, **filters))
    return Case(logits.nbytes, {"torch": partial(_torch, logits, **filters), **ours, **_flashinfer(logits, **filters)})


CASES: dict[str, Callable[[Shape], Case]] = {
    "sample_greedy": greedy,
    **{name: partial(drawn, **filters) for name, filters in FILTERS.items()},
}


def _torch(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """One setting for all rows, and a draw that no seed decides."""
    scores = logits.float() / _TEMPERATURE
    if not top_k and not top_p:
        return scores.softmax(dim=1).multinomial(1)
    ranked, ids = scores.topk(top_k, dim=1) if top_k else scores.sort(dim=1, descending=True)
    probs = ranked.softmax(dim=1)
    if top_p:
        probs = probs.masked_fill(probs.cumsum(dim=1) - probs >= top_p, 0)
    return ids.gather(1, probs.multinomial(1))


def _ours(s: Shape, logits: Tensor, params: SamplingParams) -> Forms:
    def form(fused: bool) -> Callable[[], object]:
        sampler = Sampler(s.config.vocab_size, s.device, fused=fused)
        args = sampler.prepare(requests(s, params))
        return lambda: sampler.sample(logits, args)

    return {"minisgl": form(fused=False), **({"triton": form(fused=True)} if triton_runs(s.device) else {})}


def _flashinfer(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Forms:
    """Settings a row and seeds on the device, as a server has them: with numbers it takes other kernels."""
    ones = torch.ones(len(logits), device=logits.device)
    temperatures, k, p = ones * _TEMPERATURE, (ones * (top_k or 0)).int(), ones * (top_p or 1)
    start = {name: torch.zeros(1, dtype=torch.int64, device=logits.device) for name in ("seed", "offset")}
    try:
        from flashinfer import sampling

        if top_k and top_p:
            draw = partial(sampling.top_k_top_p_sampling_from_probs, top_k=k, top_p=p, **start)
        elif top_k:
            draw = partial(sampling.top_k_sampling_from_probs, top_k=k, **start)
        elif top_p:
            draw = partial(sampling.top_p_sampling_from_probs, top_p=p, **start)
        else:
            draw = partial(sampling.sampling_from_probs, **start)
        call = lambda: draw(sampling.softmax(logits, temperatures))  # noqa: E731
        call()
    except (ImportError, RuntimeError, ValueError) as error:
        print(f"  flashinfer cannot run here: {str(error).splitlines()[0]:.100}", file=sys.stderr)
        return {}
    return {"flashinfer": call}
