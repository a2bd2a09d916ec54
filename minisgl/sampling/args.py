"""The sampling parameters of a batch, as tensors on the device. Knows nothing of requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl.sampling.logprobs import LogprobArgs
from minisgl.sampling.penalties import LogitAdjustments


@dataclass(frozen=True, eq=False)
class BatchSamplingArgs:
    """One entry a row. What no row asks for is None, and costs nothing: all None is argmax for the whole batch. A
    batch's own have no filters: rows that ask for such things are apart."""

    temperatures: Tensor | None = None  # float32 [rows]; None: every row is greedy, and what follows is None too
    greedy: Tensor | None = None  # bool [rows]: rows that take their argmax all the same; None: no row does
    seeds: Tensor | None = None  # int64 [rows]
    positions: Tensor | None = None  # int64 [rows]: of the tokens to be drawn
    top_k: Tensor | None = None  # int64 [rows], 1 to vocab_size, which keeps all
    top_p: Tensor | None = None  # float32 [rows], 1 keeps all
    min_p: Tensor | None = None  # float32 [rows], 0 keeps all
    max_top_k: int = 0  # known to the host: the largest top_k below vocab_size; 0 if there is none
    open_nucleus: bool = False  # known to the host: top_p without top_k in some row, so its whole vocabulary competes
    apart: RowsApart | None = None  # here they are greedy ones
    logprobs: LogprobArgs | None = None  # to be reported with the tokens: of the logits before all this


@dataclass(frozen=True, eq=False)
class RowsApart:
    """The rows of a batch that need all their logits, to filter or to change them. The others do not pay for it."""

    rows: Tensor  # int64 [n], of the batch, ascending
    adjust: LogitAdjustments | None  # what comes first; their rows are those of the n
    args: BatchSamplingArgs  # of the n
