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
# # Stage 4 · radix cache
#
# Stage 3 forgets a request when it ends. Here its pages stay, in a tree that knows which tokens they hold, and a prompt
# that begins like an earlier one computes only what is new. By the end the tree is yours.
#
# Run the cells in order. Where it says **predict**, answer for yourself before you run the next cell. The text behind
# it is [the chapter](../chapters/stage4_radix_cache/README.md). `minisgl start 4`, in a terminal, makes
# `chapters/stage4_radix_cache/mine.py`, where you will write; until then the cells with `check` say that you have not
# begun.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from minisgl import SamplingParams, viz
from minisgl.core.req import Req
from minisgl.core.trace import Tracer, read_events
from minisgl.learn import check
from minisgl.stage3.page_table import PageTable
from minisgl.stage4.cache_manager import CacheManager
from minisgl.stage4.llm import LLM
from minisgl.stage4.radix_cache import RadixCache, RadixHandle

folder = tempfile.TemporaryDirectory()
SYSTEM = (
    "You are a guide to the solar system. Mercury is the planet nearest to the Sun, and the smallest. Venus is the "
    "hottest. Earth is the only one with life that we know of. Mars is red, and has the highest mountain. Jupiter is "
    "the largest. Saturn has the brightest rings. Uranus lies on its side. Neptune is the farthest, and has the "
    "strongest winds. Answer in one short sentence."
)
QUESTIONS = ["Which planet is the largest?", "Which planet is the smallest?", "Which planet is red?"]

# %% [markdown]
# ## What breaks today
#
# A chat of three turns, once with a cache that remembers nothing (what stage 3 does) and once with the tree. Each
# turn sends everything that was said so far.
#
# **Predict:** turn 2 has 130 tokens. How many of them does each compute?

# %%
params = SamplingParams(max_tokens=12)
turns, seconds = {}, {}
for cache in ("naive", "radix"):
    trace = Path(folder.name) / f"{cache}.json"
    with LLM("smollm2-135m", dtype="float32", cache=cache, max_seq_len=1024, trace=str(trace)) as llm:
        llm.generate("warm up", SamplingParams(max_tokens=1))
        chat = [{"role": "system", "content": SYSTEM}]
        turns[cache] = []
        for question in QUESTIONS:
            chat.append({"role": "user", "content": question})
            answer = llm.generate([llm.tokenizer.encode_chat(chat)], params)[0]
            chat.append({"role": "assistant", "content": answer.text})
            turns[cache].append(answer)
    spans = [event for event in read_events(trace) if event.phase == "X" and event.name == "prefill"]
    seconds[cache] = [(span.duration or 0) / 1e9 for span in spans[1:]]  # a prompt's prefill is one step

for cache, answers in turns.items():
    print(cache, [f"{a.prompt_tokens - a.cached_tokens} of {a.prompt_tokens} tokens" for a in answers])
print([answer.text for answer in turns["radix"]])

# %%
computed = {cache: [a.prompt_tokens - a.cached_tokens for a in answers] for cache, answers in turns.items()}
assert [a.token_ids for a in turns["naive"]] == [a.token_ids for a in turns["radix"]]
assert computed["radix"][0] == computed["naive"][0]
assert all(few < many / 4 for few, many in zip(computed["radix"][1:], computed["naive"][1:], strict=True))
viz.time_parts(
    {
        f"turn {turn + 1}, {cache}": {"until the first token": seconds[cache][turn]}
        for turn in range(3)
        for cache in ("naive", "radix")
    },
    title=f"Turn 2 computes {computed['radix'][1]} prompt tokens instead of {computed['naive'][1]}, "
    f"turn 3 {computed['radix'][2]} instead of {computed['naive'][2]}",
)

# %% [markdown]
# The answers are the same, token for token. (They are short, and the model is small: it has not read its own rules
# well. In the committed figure other work ran beside it: look at the ratios.) What was found is a whole number of pages
# of 16 tokens; the rest of this notebook is how.

# %% [markdown]
# ## A tree of prefixes
#
# Letters are tokens, a page has 2 slots, the pool 8 pages, and there is no model: a step only takes its pages. This is
# the example of the chapter, run by the package's own manager. `begin` matches and locks; `compute` is a step that
# samples the letter it is given, after which the request is cached; at its last token it ends.

# %%
table = PageTable(num_rows=4, max_seq_len=16, page_size=2, dummy_slot=16, device=torch.device("cpu"))
manager = CacheManager(table, num_pages=8, cache="radix", tracer=Tracer(None))
reqs: dict[int, Req] = {}


def letters(word: str) -> torch.Tensor:
    return torch.tensor([ord(letter) for letter in word], dtype=torch.int32)


def word(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def begin(uid: int, prompt: str, max_tokens: int) -> None:
    handle = manager.match_req(letters(prompt))
    manager.lock(handle)
    reqs[uid] = Req(uid, letters(prompt), SamplingParams(max_tokens=max_tokens), uid, handle.cached_len, handle)
    table.set_prefix(uid, handle.slots())


def allocate(uid: int) -> None:
    manager.allocate([reqs[uid]])


def compute(uid: int, sampled: str) -> None:
    req = reqs[uid]
    req.complete_one()
    ended = req.append_host(ord(sampled), frozenset())
    manager.cache_req(req, finished=ended is not None)


def step(uid: int, sampled: str) -> None:
    allocate(uid)
    compute(uid, sampled)


# %% [markdown]
# Request 0 is `abcdef`, answered with G and H. Request 1 is its second turn, `abcdefGHij`. Request 2, `abcdxy`, has
# only its beginning in common with them.
#
# **Predict:** how many tokens does request 1 find? And request 2? Which pages do they share?

# %%
snapshots = viz.radix_steps(
    manager.cache,
    [
        ("0 is prefilled", lambda _: [begin(0, "abcdef", 2), step(0, "G")]),
        ("0 ends", lambda _: step(0, "H")),
        ("1 is matched", lambda _: begin(1, "abcdefGHij", 2)),
        ("1 is prefilled", lambda _: step(1, "K")),
        ("2 is matched", lambda _: begin(2, "abcdxy", 2)),
        ("2 is prefilled", lambda _: step(2, "Z")),
    ],
)
found = {uid: req.cached_tokens for uid, req in reqs.items()}
print("found:", found)
assert found == {0: 0, 1: 6, 2: 4}
viz.page_table(table, [reqs[1], reqs[2]], num_pages=8)

# %% [markdown]
# Both rows begin with pages 0 and 1 (hatched). Request 1 did not find `GH`: G's page was half full when request 0
# ended, and H was never computed. Request 2 matched four of the six tokens of a node; so the tree had to be cut there.

# %%
assert {word(node.tokens.tolist()): node.ref_count for node in manager.cache.nodes()} == {
    "abcd": 2,
    "ef": 1,
    "GHij": 1,
    "xy": 1,
}
viz.radix_tree(snapshots[-1], word)

# %% [markdown]
# Then both end, and request 3 wants three pages where two are free.
#
# **Predict:** what goes?

# %%
snapshots += viz.radix_steps(
    manager.cache,
    [
        ("1 ends", lambda _: step(1, "L")),
        ("2 ends", lambda _: step(2, "W")),
        ("3 is matched", lambda _: begin(3, "pqrstu", 1)),
        ("3 wants pages", lambda _: allocate(3)),
        ("3 is prefilled, and ends", lambda _: compute(3, "V")),
    ],
)[1:]
assert table.slots(3, 6).tolist() == [8, 9, 6, 7, 12, 13]
assert manager.allocator.num_free == 1
manager.check_integrity([])
viz.slider([viz.radix_tree(snapshot, word) for snapshot in snapshots], start=-2)

# %% [markdown]
# Move the slider: the tree after each event (here it stands at the eviction). One page was missing and two went,
# since a leaf goes whole; `GHij` was the leaf used longest ago.

# %% [markdown]
# ## Exercise 4.1 · walk down the tree
#
# From here on a tree by itself, pages of 2. `walk` goes as far as whole pages agree, and returns the node and the
# length.
#
# **Predict:** the lengths for these words, and the nodes of the tree after them all.

# %%
cache = RadixCache(page_size=2)
cache.insert_prefix(letters("aabbccdd"), torch.arange(8, dtype=torch.int32))
lengths = {}
for text in ("aabbccdd", "aabbccd", "aabbzz", "aab", "aza", "zz"):
    node, lengths[text] = cache.walk(letters(text))
print(lengths)
print("nodes:", [word(node.tokens.tolist()) for node in cache.nodes()])
assert lengths == {"aabbccdd": 8, "aabbccd": 6, "aabbzz": 4, "aab": 2, "aza": 0, "zz": 0}
viz.radix_tree(cache, word)

# %% [markdown]
# A walk cuts where it leaves a node, so asking changes the tree's shape (never what is in it). Look at the times: each
# node has that of the last walk that passed it, and no node is older than what is below it.

# %%
check("4.1")

# %% [markdown]
# ## Exercise 4.2 · split a node
#
# A request holds a handle: a length, and the node at the **end** of its prefix. A split must leave it true.
#
# **Predict:** which of the two nodes is the new object, if the handle is to keep its meaning?

# %%
cache = RadixCache(page_size=2)
_, handle = cache.insert_prefix(letters("aabbccdd"), torch.arange(8, dtype=torch.int32))
cache.lock(handle)
before = handle.node
upper = cache.split(cache.root, before, 4)
print("new:", word(upper.tokens.tolist()), upper.slots.tolist(), "· locks", upper.ref_count)
print("old:", word(before.tokens.tolist()), before.slots.tolist(), "· locks", before.ref_count)
print("the handle's slots:", handle.slots().tolist())
assert handle.node is before
assert handle.slots().tolist() == list(range(8))

# %%
check("4.2")

# %% [markdown]
# ## Exercise 4.3 · insert a prefix
#
# Two requests compute the same beginning, each in pages of its own, and both insert it.
#
# **Predict:** whose slots does the tree have for `aabb`, after both? What becomes of the others?

# %%
cache = RadixCache(page_size=2)
first, _ = cache.insert_prefix(letters("aabbc"), torch.arange(0, 5, dtype=torch.int32))
second, handle = cache.insert_prefix(letters("aabbxx"), torch.arange(10, 16, dtype=torch.int32))
print(f"known before: {first} and {second} tokens; the second prefix has the slots {handle.slots().tolist()}")
assert (first, second) == (0, 4)
assert handle.slots().tolist() == [0, 1, 2, 3, 14, 15]
assert cache.evictable_size == 6

# %% [markdown]
# The first one's. The caller learns that 4 tokens were known, points its row at the tree's slots, and only then frees
# its own 10 to 13. The `c`, half a page, is not kept.

# %%
check("4.3")

# %% [markdown]
# ## Exercise 4.4 · lock and unlock
#
# **Predict:** the two sizes after each line. `aabbcc` and `aabbxx` have four tokens in common.

# %%
cache = RadixCache(page_size=2)
handles = [
    cache.insert_prefix(letters(text), torch.arange(start, start + 6, dtype=torch.int32))[1]
    for start, text in ((0, "aabbcc"), (10, "aabbxx"), (20, "zzzzzz"))
]
sizes = [(cache.evictable_size, cache.protected_size)]
for handle in handles[:2]:
    cache.lock(handle)
    sizes.append((cache.evictable_size, cache.protected_size))
print("evictable, protected:", sizes)
assert sizes == [(14, 0), (8, 6), (6, 8)]
viz.radix_tree(cache, word)

# %% [markdown]
# The second lock moved only its own two tokens: `aabb` was protected already, and has two locks now. What goes next
# is what nobody holds.

# %%
check("4.4")

# %% [markdown]
# ## Exercise 4.5 · evict the least recently used
#
# The first lock is taken back, and `zzzzzz` is looked up once more.
#
# **Predict:** 3 tokens are wanted. Which leaves go, and how many tokens?

# %%
cache.unlock(handles[0])
cache.match_prefix(letters("zzzzzz"))
before = {word(node.tokens.tolist()) for node in cache.nodes()}
slots = cache.evict(3)
gone = before - {word(node.tokens.tolist()) for node in cache.nodes()}
print("gone:", sorted(gone), "· slots", slots.tolist())
assert gone == {"cc", "zzzzzz"}
assert (cache.evictable_size, cache.protected_size) == (0, 6)
viz.radix_tree(cache, word, title="cc, used longest ago, was too little: zzzzzz went too, and what is locked stayed")

# %% [markdown]
# Eight tokens for three. A handle that was not locked in time is refused, because its slots may be another's by now:

# %%
assert isinstance(handles[2], RadixHandle)
try:
    cache.lock(handles[2])
except RuntimeError as error:
    print(error)
else:
    raise AssertionError("an evicted prefix was locked")

# %%
check("4.5")

# %% [markdown]
# ## On the real model
#
# Six questions under one system prompt, all in one call. Each prompt is in the tree as soon as it is prefilled.
#
# **Predict:** how many pages do the six take, if one alone takes 7?

# %%
trace = Path(folder.name) / "shared.json"
NAMES = ("Mercury", "Venus", "Mars", "Saturn", "Uranus", "Neptune")
with LLM("smollm2-135m", num_pages=20, max_seq_len=512, trace=str(trace)) as llm:
    prompts = [
        llm.tokenizer.encode_chat(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is special about {name}?"}]
        )
        for name in NAMES
    ]
    completions = llm.generate(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
    print("tokens found:", [completion.cached_tokens for completion in completions])
    print(llm.stats())
    assert [completion.cached_tokens for completion in completions] == [0] + [80] * 5
    tree, decode = viz.snapshot_tree(llm.manager.cache), llm.tokenizer.decode
viz.radix_tree(tree, decode)

# %%
pages = viz.page_snapshots(read_events(trace), num_pages=20)
assert max(snapshot.num_shared for snapshot in pages) == 80 // 16
assert min(snapshot.num_free for snapshot in pages) == 20 - (5 + 6 * 2)
viz.page_map(pages)

# %% [markdown]
# The five pages at the top are computed once and used by all (hatched). Beside them each request has two of its own: 17
# pages instead of 42, in a pool that has 20. At the end all of them stay in the tree (grey), where the next prompt may
# find them, until pages are wanted.

# %% [markdown]
# ## Where it wins nothing
#
# The first of these prompts twice, in trees with pages of three sizes, and once with its first token changed. No model
# is needed to see what is found. As `match_req` does, we look up all but the last token.
#
# **Predict:** how many of its tokens are found?

# %%
ids = torch.tensor(prompts[0], dtype=torch.int32)
changed = ids.clone()
changed[0] += 1
found = {}
for page_size in (1, 16, 64):
    cache = RadixCache(page_size)
    cache.insert_prefix(ids, torch.arange(len(ids), dtype=torch.int32))
    found[page_size] = [cache.match_prefix(asked[:-1]).cached_len for asked in (ids, changed)]
print(f"{len(ids)} tokens; found again, and with another first token:", found)
assert found == {size: [(len(ids) - 1) // size * size, 0] for size in found}

# %% [markdown]
# At least the last token is computed always, for its logits; with larger pages up to a page. And the first token that
# differs ends the sharing: put what changes at the end.

# %% [markdown]
# ## Your code serves
#
# Once an exercise is done, `--mine 4` puts your methods in the package's place. Pages of 1 token and few of them, so
# that these three prompts need all five.

# %%
command = ["-m", "minisgl.stage4", "--mine", "4", "--page-size", "1", "--num-pages", "30", "--max-tokens", "16"]
for prompt in ("The capital of France is", "The capital of Italy is", "The colour of the sky is"):
    command += ["--prompt", prompt]
done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240)
print(done.stderr + done.stdout)

# %%
check("4")

# %% [markdown]
# ## Where it still loses
#
# - A batch starts together and ends together; a request that ends early leaves its place empty: stage 5.
# - A long prompt still stops everybody while it is prefilled: stage 5.
#
# The [chapter](../chapters/stage4_radix_cache/README.md) has the numbers, the other engines' names, and questions;
# [its side page](../chapters/stage4_radix_cache/cache-manager.md) has the manager.
