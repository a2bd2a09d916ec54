"""The page table as attention kernels want it: slots, pages, or ragged. Knows nothing of kernels.

For the rows of a batch, with the same K and V behind each view:

    slots    dense [rows, longest]        a slot for each token           (SGLang's Triton kernels)
    pages    dense [rows, most pages]     a page for each page_size tokens (FlashAttention, TensorRT-LLM)
    ragged   [total] and cu_seqlens       either of these, end to end     (FlashInfer)

Dense views are padded with the row's own first entry: safe to read, never another request's. All are copies.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from minisgl.kernel.device import device_tensor


def slots_view(page_table: Tensor, rows: list[int], lengths: list[int]) -> Tensor:
    """page_table: int32 [table_rows, width] of slots. lengths: tokens of each row, 1 or more. int32 [rows, longest]."""
    dense = page_table[:, : max(lengths)][device_tensor(rows, torch.int64, page_table.device)]
    column = torch.arange(dense.shape[1], device=dense.device)
    valid = column < device_tensor(lengths, torch.int64, dense.device)[:, None]
    return torch.where(valid, dense, dense[:, :1])


def pages_view(page_table: Tensor, rows: list[int], lengths: list[int], page_size: int) -> Tensor:
    """int32 [rows, most pages]: every page_size-th slot, divided. A page's slots are consecutive."""
    return slots_view(page_table[:, ::page_size], rows, page_counts(lengths, page_size)) // page_size


def page_counts(lengths: list[int], page_size: int) -> list[int]:
    return [-(-length // page_size) for length in lengths]


def ragged_view(dense: Tensor, counts: list[int]) -> Tensor:
    """The first counts[i] entries of each row, end to end: int32 [sum(counts)]. Row i is [cu[i], cu[i + 1])."""
    total = sum(counts)
    starts = cu_seqlens(counts, dense.device)[:-1]
    per_row = device_tensor(counts, torch.int64, dense.device)
    row = torch.repeat_interleave(torch.arange(len(counts), device=dense.device), per_row, output_size=total)
    return dense[row, torch.arange(total, device=dense.device) - starts[row]]


def cu_seqlens(lengths: list[int], device: torch.device) -> Tensor:
    """Cumulative lengths from 0, called indptr by FlashInfer: int32 [len(lengths) + 1]."""
    return device_tensor(list(accumulate(lengths, initial=0)), torch.int32, device)
