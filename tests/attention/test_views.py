"""The views of a page table, against each other and against a loop."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.attention.views import cu_seqlens, page_counts, pages_view, ragged_view, slots_view


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 4, 16]), st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 99))
def test_views_name_the_same_slots(page_size: int, lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = page_counts(lengths, page_size)
    all_pages = torch.randperm(sum(counts), generator=generator)
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].tolist()
    table = torch.full((len(lengths) + 2, (max(counts) + 1) * page_size), -7, dtype=torch.int32)
    for row, pages in zip(rows, all_pages.split(counts), strict=True):
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
        table[row, : len(slots)] = slots

    slots = slots_view(table, rows, lengths)
    pages = pages_view(table, rows, lengths, page_size)
    ragged = ragged_view(slots, lengths)
    cu = cu_seqlens(lengths, table.device).tolist()
    ragged_pages, cu_pages = ragged_view(pages, counts), cu_seqlens(counts, table.device).tolist()

    assert slots.shape == (len(rows), max(lengths))
    assert pages.shape == (len(rows), max(counts))
    assert cu == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert {slots.dtype, pages.dtype, ragged.dtype, cu_seqlens(lengths, table.device).dtype} == {torch.int32}
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        expected = table[row, :length]
        assert torch.equal(slots[i, :length], expected)
        assert torch.equal(ragged[cu[i] : cu[i + 1]], expected)
        for pages_of_row in (pages[i, : counts[i]], ragged_pages[cu_pages[i] : cu_pages[i + 1]]):
            expanded = (pages_of_row[:, None] * page_size + torch.arange(page_size)).flatten()
            assert torch.equal(expanded[:length], expected)
        assert set(slots[i, length:].tolist()) <= {int(table[row, 0])}, "padding is the row's own first slot"
        assert set(pages[i, counts[i] :].tolist()) <= {int(table[row, 0]) // page_size}


def test_views_are_copies() -> None:
    table = torch.arange(8, dtype=torch.int32).view(1, 8)
    views = [slots_view(table, [0], [5]), pages_view(table, [0], [5], 4), ragged_view(slots_view(table, [0], [5]), [5])]
    before = [view.clone() for view in views]
    table.fill_(99)
    assert all(torch.equal(view, old) for view, old in zip(views, before, strict=True))
