"""The page table against a plain list of slots for each row; what a request may ever need."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage3.page_count import check_fits, max_pages
from minisgl.stage3.page_pool import PageAllocator
from minisgl.stage3.page_table import PageTable

ROWS, MAX_SEQ_LEN = 3, 50


def make_table(page_size: int, separate: bool = False) -> PageTable:
    """separate: host and device hold two tensors, as on a GPU."""
    table = PageTable(ROWS, MAX_SEQ_LEN, page_size, dummy_slot=1000 * page_size, device=torch.device("cpu"))
    if separate:
        table.device = table.host.clone()
    return table


def make_req(prompt_len: int, row: int, cached_len: int = 0) -> Req:
    params = SamplingParams(max_tokens=MAX_SEQ_LEN - prompt_len)
    return Req(100 + row, torch.zeros(prompt_len, dtype=torch.int32), params, row, cached_len)


class TableMachine(RuleBasedStateMachine):
    """`rows[row]` lists the slots of a row's tokens, whole pages of them."""

    @initialize(page_size=st.sampled_from([1, 4, 16]), separate=st.booleans())
    def start(self, page_size: int, separate: bool) -> None:
        self.page_size = page_size
        self.table = make_table(page_size, separate)
        self.allocator = PageAllocator(ROWS * 50)
        self.reqs: dict[int, Req] = {}
        self.rows: dict[int, list[int]] = {}

    @rule(row=st.integers(0, ROWS - 1), prompt_len=st.integers(1, MAX_SEQ_LEN - 1), shared=st.integers(0, 3))
    def admit(self, row: int, prompt_len: int, shared: int) -> None:
        """A new request takes the row, perhaps behind a prefix that somebody else computed."""
        pages = self.allocator.allocate(min(shared, (prompt_len - 1) // self.page_size))
        prefix = [int(page) * self.page_size + i for page in pages for i in range(self.page_size)]
        self.table.set_prefix(row, torch.tensor(prefix, dtype=torch.int32))
        old = self.rows.pop(row, [])
        self.allocator.free(torch.tensor(old[:: self.page_size], dtype=torch.int32) // self.page_size)
        self.reqs[row] = make_req(prompt_len, row, len(prefix))
        self.rows[row] = prefix

    @rule()
    def forward(self) -> None:
        """Everyone at once: prompts, chunk after prefix, one token."""
        reqs = [req for req in self.reqs.values() if req.device_len <= MAX_SEQ_LEN]
        needed = [self.table.pages_needed(req) for req in reqs]
        pages = self.allocator.allocate(sum(needed)).tolist()
        self.table.assign(reqs, torch.tensor(pages, dtype=torch.int32))
        for req, count in zip(reqs, needed, strict=True):
            slots = self.rows[req.table_idx]
            assert (len(slots) + count * self.page_size) - req.device_len in range(self.page_size)
            for page in pages[:count]:
                slots += range(page * self.page_size, (page + 1) * self.page_size)
            del pages[:count]
            req.complete_one()

    @invariant()
    def same_as_the_lists(self) -> None:
        size = self.page_size
        for row, slots in self.rows.items():
            length = self.reqs[row].cached_len
            assert self.table.host[row, : len(slots)].tolist() == slots
            assert self.table.device[row, : len(slots)].tolist() == slots
            assert self.table.slots(row, length).tolist() == slots[:length]
            pages = [slot // size for slot in slots[::size]]
            assert self.table.pages(row, 0, length).tolist() == pages[: -(-length // size)]
            assert self.table.pages(row, size, length).tolist() == pages[1 : max(1, -(-length // size))]
        dummy = self.table.host[self.table.dummy_row]
        assert bool((dummy == 1000 * size).all())


TableMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
TestTable = TableMachine.TestCase


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_hazard_6_the_longest_sequence_fits_its_row(page_size: int) -> None:
    """max_seq_len is no multiple of the page size, and the last page is written whole."""
    table = make_table(page_size)
    assert table.host.shape == (ROWS + 1, -(-MAX_SEQ_LEN // page_size) * page_size)
    req = make_req(prompt_len=MAX_SEQ_LEN - 1, row=ROWS - 1)
    req.device_len = MAX_SEQ_LEN
    count = table.pages_needed(req)
    table.assign([req], torch.arange(count, dtype=torch.int32))
    assert table.slots(ROWS - 1, MAX_SEQ_LEN).tolist() == list(range(MAX_SEQ_LEN))
    assert bool((table.host[: ROWS - 1] == table.host[-1, 0]).all())  # other rows: still the dummy slot


@pytest.mark.parametrize("separate", [False, True])
def test_hazard_3_slots_are_a_copy(separate: bool) -> None:
    table = make_table(4, separate)
    table.set_prefix(0, torch.arange(8, dtype=torch.int32))
    slots, pages = table.slots(0, 8), table.pages(0, 0, 8)
    table.set_prefix(0, torch.arange(40, 48, dtype=torch.int32))
    assert slots.tolist() == list(range(8))
    assert pages.tolist() == [0, 1]


def test_assign_refuses_the_wrong_number_of_pages_and_writes_nothing() -> None:
    table = make_table(4)
    before = table.host.clone()
    with pytest.raises(RuntimeError, match="2 pages were given to requests that need 3"):
        table.assign([make_req(9, row=0)], torch.arange(2, dtype=torch.int32))
    assert torch.equal(table.host, before)


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 4, 16]))
def test_hazard_4_max_pages_is_what_a_request_really_takes(prompt_len: int, max_tokens: int, page_size: int) -> None:
    """Run it to its last token, counting pages as they are given out."""
    table = PageTable(1, prompt_len + max_tokens, page_size, dummy_slot=0, device=torch.device("cpu"))
    params = SamplingParams(max_tokens=max_tokens)
    req = Req(0, torch.zeros(prompt_len, dtype=torch.int32), params, table_idx=0)
    taken = 0
    for _ in range(max_tokens):
        taken += table.pages_needed(req)
        req.complete_one()
    assert taken == max_pages(prompt_len, params, page_size)


def test_hazard_4_a_request_that_can_never_fit_is_named() -> None:
    check_fits(17, SamplingParams(max_tokens=16), page_size=16, num_pages=2)  # 32 tokens are computed, the 33rd is not
    with pytest.raises(ValueError, match=r"18 prompt tokens and max_tokens 16 need 3 pages, and the pool has 2"):
        check_fits(18, SamplingParams(max_tokens=16), page_size=16, num_pages=2)
