"""Which kernel makes a linear layer's product on a GPU, by its rows and the size of its weight. Knows no model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from minisgl.kernel.cublaslt_choices import plans_for
from minisgl.kernel.linear import linear, linear_in_halves
from minisgl.layers.linear import LocalLinear

LARGE_WEIGHT = 1 << 24  # elements: smaller products are launches more than work

# With a bias torch asks cublasLt, which chooses better for few rows: on an H200 Llama-3.1-8B's down_proj takes 33 µs
# for 32 to 96 rows instead of 35 to 38, the sum of a layer's four products 2 to 5 % less. Others are as fast or slower.
_FEW_ROWS = range(24, 113)

# Of these rows the tiles of one result leave a third or more of the multiprocessors without work, and there are enough
# for two of half the inputs each: down_proj of 224 rows takes 51.5 µs whole and 37.7 in halves, o_proj 20.2 and 13.2, a
# whole step of 128 to 256 rows 1 to 3 % less. With fewer rows no step was seen to gain.
ROWS_FOR_HALVES = range(113, 257)
_MOST_OUTPUTS = 4096


def fast_product(layer: LocalLinear, tuned: bool = True) -> Callable[[Tensor, Tensor | None], Tensor]:
    """As `layer.product`. tuned: with what `python -m minisgl.benchmark tune-linear` wrote."""
    from minisgl.kernel.triton_linear import gemv

    large = layer.weight.numel() >= LARGE_WEIGHT
    no_bias = layer.weight.new_zeros(layer.weight.shape[0]) if large else None
    plans = plans_for(layer.weight) if large and tuned else {}

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        rows = len(x)
        if bias is None and rows == 1:
            return gemv(x, layer.weight)
        if bias is None and rows in plans and x.is_contiguous() and x.data_ptr() % 16 == 0:
            return plans[rows](x, layer.weight)
        return linear(x, layer.weight, no_bias if bias is None and rows in _FEW_ROWS else bias)

    return product


def is_better_halved(layer: LocalLinear) -> bool:
    """Whether products of `ROWS_FOR_HALVES` are, where the norm that comes next can add the halves."""
    weight, (outputs, inputs) = layer.weight, layer.weight.shape
    rows_begin_at_16_bytes = inputs % 16 == 0 and weight.itemsize == 2
    return rows_begin_at_16_bytes and layer.bias is None and outputs <= _MOST_OUTPUTS and weight.numel() >= LARGE_WEIGHT


def halves(layer: LocalLinear) -> Callable[[Tensor, Tensor | None], Tensor]:
    """As `layer.product`, or [2, rows, outputs] whose sum that is."""
    return partial(_halves, layer, layer.product)


def _halves(layer: LocalLinear, whole: Callable[..., Tensor], x: Tensor, bias: Tensor | None) -> Tensor:
    return linear_in_halves(x, layer.weight) if len(x) in ROWS_FOR_HALVES else whole(x, bias)
