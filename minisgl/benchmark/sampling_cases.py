"""The cases of `kernels` that choose tokens: greedy, drawn, drawn from what filters leave. Times nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from minisgl.benchmark.kernel_cases import Case, Forms, Shape, requests
from minisgl.core.sampling_params import SamplingParams
from minisgl.kernel.triton_runs import triton_runs
from minisgl.sampling.sampler import Sampler


def sample_greedy(s: Shape) -> Case:
    return _sampling(s, SamplingParams(), lambda logits: logits.argmax(dim=1))


def sample_drawn(s: Shape) -> Case:
    return _sampling(s, SamplingParams(temperature=0.6, seed=1), _draw)


def sample_top_p(s: Shape) -> Case:
    return _sampling(s, SamplingParams(temperature=0.6, top_p=0.9, top_k=50, seed=1), _draw)


def _draw(logits: Tensor) -> Tensor:
    """Without filters."""
    return (logits.float() / 0.6).softmax(dim=1).multinomial(1)


def _sampling(s: Shape, params: SamplingParams, plain: Callable[[Tensor], Tensor]) -> Case:
    logits = s.random(s.batch, s.config.vocab_size)

    def form(fused: bool) -> Callable[[], object]:
        sampler = Sampler(s.config.vocab_size, s.device, fused=fused)
        args = sampler.prepare(requests(s, params))
        return lambda: sampler.sample(logits, args)

    forms: Forms = {"minisgl": form(fused=False), "torch": lambda: plain(logits)}
    if triton_runs(s.device):
        forms["triton"] = form(fused=True)
    return Case(logits.nbytes, forms)


CASES: dict[str, Callable[[Shape], Case]] = {
    "sample_greedy": sample_greedy,
    "sample_drawn": sample_drawn,
    "sample_top_p": sample_top_p,
}
