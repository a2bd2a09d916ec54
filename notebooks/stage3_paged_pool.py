# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Stage 3 · paged pool
#
# Stage 2 keeps room for the longest sequence, and one request at a time has it. Here all requests share one pool, take
# pages of it as they grow, and decode together. By the end the allocator, the page table, scatter, gather and the
# memory budget are yours.
#
# Run the cells in order. Where it says **predict**, answer for yourself before you run the next cell. The text behind
# it is [the chapter](../chapters/stage3_paged_pool/README.md). `minisgl start 3`, in a terminal, makes
# `chapters/stage3_paged_pool/mine.py`, where you will write; until then the cells with `check` say that you have not
# begun.

# %%
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from minisgl import SamplingParams, viz
from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.attention.views import cu_seqlens, page_counts, pages_view, ragged_view, slots_view
from minisgl.core.req import Req
from minisgl.core.trace import read_events
from minisgl.learn import check
from minisgl.stage2.llm import LLM as ContiguousLLM
from minisgl.stage3.llm import LLM
from minisgl.stage3.page_pool import KVCachePool, PageAllocator
from minisgl.stage3.page_table import PageTable

folder = tempfile.TemporaryDirectory()
CPU, GIB = torch.device("cpu"), 2**30
TEXT = (
    "The sun rises in the east and sets in the west. The moon moves around the Earth, and the Earth moves around the "
    "sun. It takes one year for the Earth to go around the sun, and one month for the moon to go around the Earth."
)

# %% [markdown]
# ## What breaks today
#
# Three requests have 300, 500 and 100 tokens. Stage 2's way is a cache of 8,192 slots for each.
#
# **Predict:** what share of those slots is empty? And of pages of 16 slots, when each request takes as many as it
# needs?

# %%
lengths = {0: 300, 1: 500, 2: 100}
pages = {uid: -(-length // 16) for uid, length in lengths.items()}
print("pages:", pages, " slots:", 16 * sum(pages.values()), "for", sum(lengths.values()), "tokens")
assert all(0 <= 16 * pages[uid] - length < 16 for uid, length in lengths.items())
viz.memory_waste(lengths, 8192, 16)

# %% [markdown]
# ## Five requests in 16 pages
#
# A pool of 16 pages of 16 slots: 256 tokens for everyone. The five requests have prompts of 40, 12, 25, 33 and 20
# tokens, and want 24, 40, 12, 30 and 20 more. Stage 2 answers them too, one after the other, to compare.
#
# **Predict:** 256 slots hold which of them at once? A request counts with all that it may need.

# %%
wanted = [(40, 24), (12, 40), (25, 12), (33, 30), (20, 20)]
params = [SamplingParams(max_tokens=new, ignore_eos=True) for _, new in wanted]
with ContiguousLLM("smollm2-135m", dtype="float32", max_seq_len=1024) as llm:
    tokens = llm.tokenizer.encode(TEXT)
    prompts = [tokens[:length] for length, _ in wanted]
    one_by_one = [answer.token_ids for answer in llm.generate(prompts, params)]

trace = Path(folder.name) / "five.json"
with LLM("smollm2-135m", dtype="float32", page_size=16, num_pages=16, trace=str(trace)) as llm:
    together = [answer.token_ids for answer in llm.generate(prompts, params)]
    print(llm.stats())
    assert llm.stats()["pages_free"] == 16  # all came back
events = read_events(trace)
assert together == one_by_one
print("the pages each may need:", [-(-(length + new - 1) // 16) for length, new in wanted])

# %% [markdown]
# 4 + 4 + 3 + 4 are 15 pages, so the first four run, and the fifth, which may need 3, waits until the last of them has
# ended. Each colour is a request, and each line a page:

# %%
snapshots = viz.page_snapshots(events, num_pages=16)
first_group = {uid for moment in snapshots if 4 not in moment.rows for uid in moment.rows}
assert first_group == {0, 1, 2, 3}
assert all(set(moment.rows) == {4} for moment in snapshots if 4 in moment.rows)
assert min(moment.num_free for moment in snapshots) == 4
viz.page_map(snapshots)

# %% [markdown]
# A request's pages lie anywhere, it takes the next when the last is full, and what one gives back another takes. At
# least 4 pages were free all the time, and the fifth would never have needed more than 3: it waited because the others
# *might* have taken them.
#
# How many slots were taken and empty, at worst? The trace notes a row's pages at every step:

# %%
steps_of, empty = Counter(), []
for event in events:
    if event.name == "row_pages" and event.args["pages"]:
        length = wanted[event.uid][0] + steps_of[event.uid]  # the prompt, and one token for each step after it
        steps_of[event.uid] += 1
        empty.append(16 * len(event.args["pages"]) - length)
print(f"{len(empty)} times a row in a step: {min(empty)} to {max(empty)} slots empty")
assert set(empty) <= set(range(16))

# %% [markdown]
# ## Exercises 3.1 and 3.2 · allocate and free
#
# Free pages are a stack, page 0 on top at first. Both methods take many pages in one call.
#
# **Predict:** the pages that the three calls of `allocate` return.

# %%
allocator = PageAllocator(6)
first = allocator.allocate(3)
allocator.free(torch.tensor([1, 2], dtype=torch.int32))
second, third = allocator.allocate(1), allocator.allocate(2)
print(first.tolist(), second.tolist(), third.tolist(), " still free:", allocator.free_pages().tolist())
assert (first.tolist(), second.tolist(), third.tolist()) == ([0, 1, 2], [2], [1, 3])

# %% [markdown]
# A page that is freed twice would be given to two requests, and their answers would mix, much later. So it is refused:

# %%
try:
    allocator.free(torch.tensor([2, 4], dtype=torch.int32))  # 4 is free
except RuntimeError as error:
    print(error)
print("nothing was freed:", allocator.free_pages().tolist())
assert allocator.num_free == 2

# %%
check("3.1")
check("3.2")

# %% [markdown]
# ## Exercise 3.3 · slots of pages
#
# The chapter's example by hand: pages of 4, A has 6 prompt tokens and B has 3. `step` does what the loop does around a
# forward: pages for the tokens that are new, their slots, and then the lengths.
#
# **Predict:** who takes a page in which step, and which slots do the new tokens go to?

# %%
table, allocator = PageTable(num_rows=2, max_seq_len=16, page_size=4, dummy_slot=24, device=CPU), PageAllocator(6)
a = Req(0, torch.zeros(6, dtype=torch.int32), SamplingParams(max_tokens=4), table_idx=0)
b = Req(1, torch.zeros(3, dtype=torch.int32), SamplingParams(max_tokens=3), table_idx=1)


def step(*reqs: Req) -> None:
    needed = [table.pages_needed(req) for req in reqs]
    taken = allocator.allocate(sum(needed))
    table.assign(list(reqs), taken)
    slots = [table.host[req.table_idx, req.cached_len : req.device_len].tolist() for req in reqs]
    print("AB"[reqs[0].uid], "" if len(reqs) == 1 else "B", " pages", taken.tolist(), " slots of new tokens", slots)
    for req in reqs:
        req.complete_one()


step(a)
step(b)
step(a, b)
step(a, b)
print(table.host)
assert table.host[1, :5].tolist() == [8, 9, 10, 11, 12]
viz.page_table(table, [a, b], num_pages=6)

# %% [markdown]
# B ends here and frees its pages. 24 is the dummy slot: where nothing was assigned, a write would go nowhere.
#
# **Predict:** A's next token is its ninth. Which page does it get?

# %%
allocator.free(table.pages(b.table_idx, 0, b.cached_len))
step(a)
assert table.pages(0, 0, a.cached_len).tolist() == [0, 1, 3]
viz.page_table(table, [a], num_pages=6, title="A's ninth token is in page 3, which was B's")

# %%
check("3.3")

# %% [markdown]
# ## Exercise 3.4 · scatter K and V
#
# One tensor for everyone, with one page more than is given out. A step's tokens come end to end, and go where `out_loc`
# says.
#
# **Predict:** tokens of value 1, 2, 3 with `out_loc` 6, 0, 3: what is in the slots 0 to 9?

# %%
pool = KVCachePool(num_layers=2, num_pages=4, page_size=2, num_kv_heads=1, head_dim=1, dtype=torch.float32, device=CPU)
values = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)  # [tokens, kv_heads, head_dim]
pool.store(1, values, 10 * values, torch.tensor([6, 0, 3], dtype=torch.int32))
print("K of layer 1:", pool.k_cache(1).flatten().tolist(), " (the last two are the dummy page)")
assert pool.k_cache(1).flatten().tolist() == [2, 0, 0, 3, 0, 0, 1, 0, 0, 0]

# %%
check("3.4")

# %% [markdown]
# ## Exercise 3.5 · gather pages
#
# To attend, a CPU copies a row's pages together, in the order of its table.

# %%
attention = PagedTorchAttention(num_q_heads=1, num_kv_heads=1, head_dim=1, page_size=2)
cache = torch.arange(8.0).view(8, 1, 1)  # slot i holds i
found = attention.gather(cache, torch.tensor([2, 0], dtype=torch.int32)).flatten().tolist()
print("pages 2 and 0 of 2 slots:", found)
assert found == [4, 5, 0, 1]

# %% [markdown]
# Whole pages are gathered, so what comes back has slots that no token of this request wrote. They get the weight 0.
#
# **Predict:** we fill all the pool with NaN, and ask again. Do the answers change?

# %%
print("0 × NaN =", 0.0 * torch.tensor(float("nan")).item())
with LLM("smollm2-135m", dtype="float32", num_pages=16) as llm:
    llm.engine.pool._kv.fill_(float("nan"))
    few = llm.generate(prompts[:2], SamplingParams(max_tokens=8, ignore_eos=True))
assert [answer.token_ids for answer in few] == [ids[:8] for ids in one_by_one[:2]]
print("the same answers:", [answer.text for answer in few])

# %% [markdown]
# They do not, because V behind a row's last token is set to 0 in what was gathered. That is why `gather` must return a
# copy: in a view, it would be set to 0 in the pool, where it may be somebody's.

# %%
check("3.5")

# %% [markdown]
# ## What attention is told
#
# Linear layers do not care whose token it is; attention does. It is told once a step, in the form its kernel wants:
# [a page of its own](../chapters/stage3_paged_pool/attention-metadata.md). Three views of one page table, for A in row
# 0 with 9 tokens, and B in row 1 as it was with 5:

# %%
rows, row_lengths = [0, 1], [9, 5]
dense = pages_view(table.device, rows, row_lengths, page_size=4)
counts = page_counts(row_lengths, 4)
print("slots  ", slots_view(table.device, rows, row_lengths).tolist())
print("pages  ", dense.tolist(), " (padded with the row's own first page)")
print("ragged ", ragged_view(dense, counts).tolist(), " indptr", cu_seqlens(counts, CPU).tolist(), end="")
print("  last_page_len", [(length - 1) % 4 + 1 for length in row_lengths])
assert ragged_view(dense, counts).tolist() == [0, 1, 3, 2, 3]

# %% [markdown]
# (Page 3 is in both: B's row still has it, although B has freed it. Nobody reads a row without a request.)

# %% [markdown]
# ## Exercise 3.6 · the memory budget
#
# (Its text is [a page of its own](../chapters/stage3_paged_pool/memory-budget.md).)
#
# How many pages? An H100 with 78 GiB free, of which 90 % may be used, and a model of Llama-3-8B's shape that takes 16
# GiB: 32 layers, 8 KV heads of 128, 2 bytes a number.
#
# **Predict:** what does a page of 16 tokens take? About how many tokens fit?

# %%
page = KVCachePool.page_bytes(num_layers=32, page_size=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
parts, num_pages = viz.budget_parts(0.9, 78 * GIB, 16 * GIB, page)
print(f"a page takes {page:,} bytes; {num_pages:,} pages are {16 * num_pages:,} tokens")
assert (page, num_pages) == (2**21, 27_749)
assert sum(parts.values()) == 78 * GIB
viz.memory_budget(parts, pages=("KV pages", num_pages))

# %%
check("3.6")

# %% [markdown]
# ## What decoding together buys
#
# **Predict:** stage 2 answered the five requests with how many forwards? A request of n tokens is a prefill and n − 1
# decode steps. And stage 3, with four together, then one?

# %%
forwards = viz.steps(events)
print("stage 2:", sum(new for _, new in wanted), "forwards; stage 3:", len(forwards))
assert len(forwards) == 4 + (40 - 1) + 1 + (20 - 1)
viz.batch_composition(events)

# %% [markdown]
# Each forward reads all the weights, whether for one token or for four. And the stairs are what is still wrong: nobody
# takes the place of a request that has ended, and the fifth waits for the longest of the four.

# %%
decoding = [one.decode for one in forwards if one.decode]
print(f"places used in decode steps of the first group: {sum(decoding[:39])} of {4 * 39}")
assert sum(decoding[:39]) == sum(new - 1 for _, new in wanted[:4]) < 0.7 * 4 * 39
viz.gantt(events, title="The fifth request waits for the longest of the four")

# %% [markdown]
# ## Your code serves
#
# Once an exercise is done, `--mine 3` puts your methods in the package's place, and says how often they were called:
# 3.1 and 3.3 once a step, 3.4 once a layer of each step, 3.5 twice a layer of each decode step.

# %%
command = ["-m", "minisgl.stage3", "--mine", "3", "--max-tokens", "16"]
command += ["--prompt", "The capital of France is", "--prompt", "Once upon a time"]
done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240)
print(done.stderr + done.stdout)

# %%
check("3")

# %% [markdown]
# ## Where it still loses
#
# - Requests that begin alike compute and keep the same pages twice: stage 4.
# - A batch starts and ends together, and a request counts with all that it may need: stage 5.
#
# The [chapter](../chapters/stage3_paged_pool/README.md) has the numbers, the other engines' names, and questions.
