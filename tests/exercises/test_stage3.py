"""Stage 3's exercises, each claim in words: pages given and taken back, slots, scatter and gather, the budget.

They hold for the package's own code; `minisgl check 3` runs them on a learner's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from wrong import equal, refused

from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage3.page_pool import KVCachePool, PageAllocator
from minisgl.stage3.page_table import PageTable

CPU = torch.device("cpu")
GIB = 2**30


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def marks_agree(allocator: PageAllocator) -> None:
    free = sorted(allocator.free_pages().tolist())
    marked = allocator._is_free.nonzero().flatten().tolist()
    assert free == marked, f"the stack says {free} are free, and the marks (_is_free) say {marked}"


def test_the_top_of_the_stack_is_given_first() -> None:
    allocator = PageAllocator(6)
    pages = allocator.allocate(3)
    equal(pages, [0, 1, 2], "six pages, 0 on top: the topmost comes first")
    assert pages.dtype == torch.int32, f"pages are int32, not {pages.dtype}"
    assert allocator.num_free == 3, f"3 of 6 pages were taken, and num_free says {allocator.num_free}"
    marks_agree(allocator)


def test_no_page_is_given_twice() -> None:
    allocator = PageAllocator(6)
    given = [page for count in (2, 0, 1, 3) for page in allocator.allocate(count).tolist()]
    assert sorted(given) == list(range(6)), f"6 pages in 4 calls: each once. A page was given twice: {given}"
    marks_agree(allocator)


def test_too_many_pages_are_refused_and_none_is_taken() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(2)
    refused("3 pages were wanted and 2 are free", allocator.allocate, 3)
    assert allocator.num_free == 2, (
        f"3 pages were wanted and 2 are free: none may be taken, num_free is {allocator.num_free}"
    )
    marks_agree(allocator)


def test_pages_given_out_do_not_change_later() -> None:
    allocator = PageAllocator(4)
    first = allocator.allocate(2)
    second = allocator.allocate(2)
    copies = first.clone(), second.clone()
    for pages in copies:
        allocator.free(pages)
    equal(first, [0, 1], "what was given out changed later, when other pages were freed: it was a view of the stack")


def test_freed_pages_can_be_given_again() -> None:
    allocator = PageAllocator(5)
    allocator.allocate(4)
    allocator.free(int32(1, 3))
    assert allocator.num_free == 3, f"1 page was free and 2 came back: num_free is {allocator.num_free}"
    marks_agree(allocator)
    found = sorted(allocator.allocate(3).tolist())
    assert found == [1, 3, 4], f"the free pages are 1, 3 and 4, and {found} were given"


def test_the_page_that_was_freed_last_is_given_first() -> None:
    allocator = PageAllocator(6)
    allocator.allocate(3)
    allocator.free(int32(1, 2))
    equal(
        allocator.allocate(3),
        [2, 1, 3],
        "free(1, 2) puts 1 on the stack and then 2: what was freed last is on top, and is given first",
    )


def test_a_page_that_is_free_is_not_freed_again() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(3)
    refused("page 3 is free already, and was freed a second time", allocator.free, int32(1, 3))
    assert allocator.num_free == 1, "page 3 was free already: nothing may be freed by such a call, not even page 1"
    marks_agree(allocator)


def test_a_page_twice_in_one_call_is_refused() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(3)
    refused("page 1 was twice in one call", allocator.free, int32(1, 2, 1))
    assert allocator.num_free == 1, "page 1 was there twice: nothing may be freed by such a call, not even page 2"
    marks_agree(allocator)


def table(page_size: int = 4) -> PageTable:
    return PageTable(2, 16, page_size, dummy_slot=900, device=CPU)


def req(row: int, cached_len: int, device_len: int) -> Req:
    made = Req(100 + row, torch.zeros(device_len, dtype=torch.int32), SamplingParams(max_tokens=1), row, cached_len)
    made.device_len = device_len
    return made


def test_a_prompt_gets_the_slots_of_its_pages() -> None:
    made = table()
    made.assign([req(0, 0, 6)], int32(7, 2))
    row = made.host[0, :9]
    words = "pages 7 and 2 of 4 slots: tokens 0 to 3 are in slots 28 to 31, tokens 4 to 7 in slots 8 to 11"
    if row[0] == 7:
        words += ". Here the table has page numbers"
    equal(row, [28, 29, 30, 31, 8, 9, 10, 11, 900], words)


def test_a_page_that_is_not_full_is_filled_first() -> None:
    made = table()
    made.assign([req(0, 0, 6)], int32(7, 2))
    made.assign([req(0, 6, 8)], int32())
    equal(made.host[0, 4:9], [8, 9, 10, 11, 900], "tokens 6 and 7 fit in a page that is not full: no page, no change")
    made.assign([req(0, 6, 9)], int32(5))
    words = "6 tokens are cached and page 2 is not full: token 8 is the first in the new page 5"
    equal(made.host[0, 4:12], [8, 9, 10, 11, 20, 21, 22, 23], words)


def test_pages_go_to_the_requests_in_order() -> None:
    made = table()
    made.assign([req(1, 0, 5), req(0, 4, 5)], int32(3, 1, 8))
    equal(made.host[1, :8], [12, 13, 14, 15, 4, 5, 6, 7], "row 1 is first and needs two pages: 3 and 1")
    equal(made.host[0, 4:8], [32, 33, 34, 35], "row 0 is second; it has one page, and gets page 8 from token 4 on")
    assert bool((made.host[2] == 900).all()), "the last row is the dummy's: nobody writes to it"


def test_the_wrong_number_of_pages_is_refused() -> None:
    made = table()
    for pages in (int32(1), int32(1, 2, 3)):
        refused(f"2 pages were needed and {len(pages)} came", made.assign, [req(0, 0, 6)], pages)
        assert bool((made.host == 900).all()), (
            f"2 pages were needed and {len(pages)} came: refused, so nothing is written"
        )


def test_a_table_on_a_device_has_its_own_copy() -> None:
    made = table()
    made.device = made.host.clone()  # two tensors, as with a GPU
    made.assign([req(0, 0, 4)], int32(3))
    equal(
        made.device[0, :4], [12, 13, 14, 15], "the device's copy of the table was not written: attention reads that one"
    )


def pool(page_size: int = 2) -> KVCachePool:
    return KVCachePool(2, 4, page_size, 1, 2, torch.float32, CPU)


def test_tokens_are_scattered_to_their_slots() -> None:
    made = pool()
    k = torch.tensor([1.0, 2.0, 3.0])[:, None, None].expand(3, 1, 2)
    made.store(1, k, k + 10, int32(6, 0, 3))
    found = made.k_cache(1)[:, 0, 0]
    assert made.k_cache(1).any(), "the K cache is still zero after store"
    equal(found, [2, 0, 0, 3, 0, 0, 1, 0, 0, 0], "tokens 1, 2, 3 go to the slots 6, 0, 3, in this order")
    equal(made.v_cache(1)[:, 0, 0], [12, 0, 0, 13, 0, 0, 11, 0, 0, 0], "the V holds what v was: 11, 12, 13")


def gathered(cache: Tensor, pages: Tensor, out: Tensor | None = None) -> Tensor:
    found = PagedTorchAttention(2, 1, 2, page_size=2).gather(cache, pages, out)
    assert found.shape == (2 * len(pages), 1, 2), (
        f"{len(pages)} pages of 2 slots are {2 * len(pages)} rows: {found.shape}"
    )
    return found


def slots(count: int = 8) -> Tensor:
    """Slot i is all i: [slots, 1, 2]."""
    return torch.arange(float(count))[:, None, None].expand(count, 1, 2).clone()


def test_pages_are_gathered_in_their_order() -> None:
    found = gathered(slots(), int32(2, 0))[:, 0, 0]
    words = "pages 2 and 0 of 2 slots: the slots 4, 5, 0, 1, in this order"
    if found.tolist()[:2] == [2, 3] or found[0] == 2:
        words += ". This began with slot 2: page 2, not slot 2"
    equal(found, [4, 5, 0, 1], words)


def test_what_is_gathered_is_a_copy() -> None:
    cache = slots()
    gathered(cache, int32(1, 2)).fill_(-1.0)
    equal(cache, slots(), "what was gathered is a copy, so that blanking some of it leaves the cache alone, even here "
          "where the pages are neighbours")  # fmt: skip


def test_a_workspace_is_used_when_given() -> None:
    out = torch.zeros(2, 4)
    found = gathered(slots(), int32(3, 1), out)
    equal(out.flatten(), [6, 6, 7, 7, 2, 2, 3, 3], "with out given, the pages are copied into that workspace")
    assert found.data_ptr() == out.data_ptr(), "what comes back is the workspace itself, in another shape"


def test_bytes_of_a_page() -> None:
    found = KVCachePool.page_bytes(num_layers=3, page_size=16, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    hint = {1536: ": both K and V are kept", 6144: ": bfloat16 has 2 bytes"}.get(found, "")
    assert found == 3072, (
        f"3 layers, 16 tokens, 2 KV heads of 8 numbers of 2 bytes, twice: 3072 bytes, not {found}{hint}"
    )


def budget(ratio: float, free: float, model: float, page: int = GIB) -> int:
    found = KVCachePool.pages_in_budget(ratio, int(free * GIB), int(model * GIB), page)
    assert isinstance(found, int), f"a number of pages is an int, not {type(found).__name__}"
    return found


def test_the_model_comes_out_of_the_ratios_share() -> None:
    found = budget(0.5, 80, 20)
    hint = " (half of what the model leaves: but the ratio is of what was free before the model)" if found == 29 else ""
    assert found in (19, 20), f"half of 80 GiB, less a model of 20, are 20 pages of 1 GiB, not {found}{hint}"


def test_the_dummy_page_has_its_share() -> None:
    found = budget(0.5, 80.9, 20)
    assert found == 19, f"20.45 GiB hold 20 pages of 1 GiB; one of them is the dummy page: 19, not {found}"


def test_a_model_that_does_not_fit_leaves_less_than_nothing() -> None:
    found = budget(0.5, 10, 16)
    assert found < 0, f"5 GiB for a model of 16: less than nothing, which the caller refuses; not {found}"
