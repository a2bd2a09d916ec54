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
# # Stage 2 · KV cache
#
# Stage 1 computes every token again for each new one. Here what later tokens read of earlier ones is kept, and a step
# computes only what is new. By the end the four methods that do it are yours.
#
# Run the cells in order. Where it says **predict**, answer for yourself before you run the next cell. The text behind
# it is [the chapter](../chapters/stage2_kv_cache/README.md). `minisgl start 2`, in a terminal, makes
# `chapters/stage2_kv_cache/mine.py`, where you will write; until then the cells with `check` say that you have not
# begun.

# %%
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from minisgl import SamplingParams, viz
from minisgl.core.req import Req
from minisgl.core.trace import read_events
from minisgl.learn import check
from minisgl.stage1.llm import LLM as NaiveLLM
from minisgl.stage2.contiguous_cache import ContiguousCache
from minisgl.stage2.llm import LLM
from minisgl.stage5.cost_model import H200  # a device's speeds, for one figure

folder = tempfile.TemporaryDirectory()
DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, "

# %% [markdown]
# ## What breaks today
#
# Both stages answer the same prompt of 48 tokens with 48 tokens, and write a trace: one span a step, with the number
# of tokens that it computed.
#
# **Predict:** how many tokens does each compute? Stage 1 computes 48 in its first step and 95 in its last.

# %%
params = SamplingParams(max_tokens=48, ignore_eos=True)
events, answers = {}, {}
for name, llm_class in (("stage 1", NaiveLLM), ("stage 2", LLM)):
    trace = Path(folder.name) / f"{name}.json"
    with llm_class("smollm2-135m", dtype="float32", trace=str(trace)) as llm:
        prompt = llm.tokenizer.encode(DAYS * 5)[:48]
        answers[name] = llm.generate([prompt], params)[0].token_ids
    events[name] = read_events(trace)

tokens = {name: viz.step_tokens(found, uid=0) for name, found in events.items()}
print({name: sum(steps) for name, steps in tokens.items()})
assert answers["stage 1"] == answers["stage 2"]

# %%
assert tokens["stage 1"] == list(range(48, 96))
assert tokens["stage 2"] == [48] + [1] * 47
viz.cost_triangles(tokens)

# %% [markdown]
# The triangle has become a column, the **prefill**, and a diagonal, the **decode** steps; the tokens of the answer
# are the same. How long each step took:

# %%
seconds = {name: viz.step_seconds(found, uid=0) for name, found in events.items()}
assert all(len(times) == 48 for times in seconds.values())
viz.time_per_token(seconds)

# %% [markdown]
# The first dots lie close together: stage 2's prefill is what stage 1 does at every step. (The lines leave it out.
# Where other work runs beside it, the dots scatter.)

# %% [markdown]
# ## Why keys and values can be kept
#
# `_context` says what one step computes. We run one over 5 tokens, note what the last layer keeps of the first 3, and
# then run one over those 3 alone.
#
# **Predict:** do the keys of the first three tokens differ? The first run has seen two more tokens.

# %%
llm = LLM("smollm2-135m", dtype="float32", max_seq_len=1024)


def request(ids: list[int]) -> Req:
    return Req(0, torch.tensor(ids, dtype=torch.int32), params, table_idx=0)


def keys_after(ids: list[int]) -> torch.Tensor:
    """Forward all ids, and read the last layer's cache: [slots, kv_heads, head_dim]."""
    with torch.inference_mode():
        llm.model(llm._context(request(ids)))
    return llm.cache.k_cache(29).clone()


five, three = keys_after(prompt[:5]), keys_after(prompt[:3])
difference = (five[:3] - three[:3]).abs().max()
print(f"largest key {three[:3].abs().max():.1f}, largest difference {difference:.1e}")
assert difference < 1e-3

# %% [markdown]
# They are the same but for rounding: the mask lets no token see a later one, in no layer. So what is computed for a
# token stays right for ever. Later tokens read its key and its value. Nobody reads its query again.

# %% [markdown]
# ## Exercise 2.1 · append to the cache
#
# One tensor, [K or V, layer, slot, KV head, head_dim], and slot n holds token n. `store` writes a step's k and v at
# the slots that `out_loc` names.

# %%
print("all layers, K and V:", list(llm.cache._kv.shape), " one layer's K:", list(llm.cache.k_cache(0).shape))
check("2.1")

# %% [markdown]
# ## Exercise 2.2 · attend to what is cached
#
# The queries are the last n of m tokens, so query i is token m − n + i.
#
# **Predict:** the mask of 2 new tokens after 3 cached ones. And that of one new token after 4.

# %%
print(llm.attention.causal_mask(2, 5, torch.device("cpu")).int())
print(llm.attention.causal_mask(1, 5, torch.device("cpu")).int())

# %% [markdown]
# A triangle that began at the first key would hide what is cached: the one new token would see only token 0. The sum
# is by hand: all scores equal, values 2, 4, 9 in the cache, and a new one of 1.

# %%
values = torch.tensor([2.0, 4.0, 9.0, 1.0]).view(4, 1, 1)
seen = llm.attention.attend(torch.ones(1, 1, 1), torch.zeros(4, 1, 1), values)
print("the mean of all four:", seen.item())
assert seen.item() == 4.0

# %%
check("2.2")

# %% [markdown]
# ## Exercise 2.3 · positions of a step
#
# The same method makes a prefill and a decode step: the lengths of the request decide. `complete_one` is what the
# loop calls after each step, `append_host` notes the sampled token.
#
# **Predict:** ids, positions, slots and the wanted row of the first step, and of the second.

# %%
req = request([7, 8, 9])
for sampled in (10, 11):
    ctx = llm._context(req)
    print(req)
    print("  ids", ctx.input_ids.tolist(), " positions", ctx.positions.tolist(), end="")
    print("  slots", ctx.out_loc.tolist(), " row", ctx.logits_rows.tolist())
    req.complete_one()
    req.append_host(sampled, frozenset())
assert ctx.positions.tolist() == ctx.out_loc.tolist() == [3]

# %%
check("2.3")

# %% [markdown]
# ## Exercise 2.4 · bytes per token
#
# **Predict:** what does one token of context cost to keep? SmolLM2 has 30 layers, 9 query heads, 3 KV heads, 64
# numbers a head, 2 bytes each in bfloat16. And what would it cost with as many KV heads as query heads?

# %%
config = llm.model_config
cost = {
    "3 KV heads (as it is)": ContiguousCache.bytes_per_token(config, torch.bfloat16),
    "9 KV heads": ContiguousCache.bytes_per_token(replace(config, num_kv_heads=9), torch.bfloat16),
}
parameters = dict(llm.model.named_parameters())
parameters.pop("lm_head.weight", None)  # it is the embedding once more
weights = sum(parameter.numel() for parameter in parameters.values())
print(cost, f"· {weights:,} weights")
assert cost["3 KV heads (as it is)"] == 23_040
viz.cache_bytes(cost, config.max_position, model_bytes=2 * weights)

# %%
check("2.4")

# %% [markdown]
# ## Two phases, two bottlenecks
#
# A step must read every weight once. A prefill of n tokens uses each for n multiplications and additions, a decode
# step for one. An H200 does 181 FLOP in the time in which it reads a byte: the ridge.
#
# **Predict:** which side of the ridge is a decode step with 512 tokens of context on? A prefill of 512? Of 64?

# %%
head = config.vocab_size * config.hidden_size  # only the last row's logits are computed
pair = 4 * config.num_layers * config.num_heads * config.head_dim  # FLOPs of a query and a key it sees
kept = cost["3 KV heads (as it is)"]


def work(new: int, length: int) -> tuple[int, int]:
    """FLOPs, and bytes read, of a step that computes the last `new` of `length` tokens."""
    seen = sum(range(length - new + 1, length + 1))
    return 2 * (new * (weights - head) + head) + pair * seen, 2 * weights + kept * length


points = {
    "decode": work(1, 512),
    "prefill of 64": work(64, 64),
    "prefill of 512": work(512, 512),
}
ridge = H200.flops / H200.bandwidth
intensity = {name: flops / moved for name, (flops, moved) in points.items()}
assert intensity["decode"] < intensity["prefill of 64"] < ridge < intensity["prefill of 512"]
viz.roofline(points, H200)

# %% [markdown]
# A decode step leaves more than 99 % of the arithmetic idle, and what it waits for is mostly weights. (A CPU has its
# ridge further left, and the same two sides: look again at how long stage 2's first step took, for 48 tokens, and the
# others for one.)

# %%
print(f"weights {2 * weights:,} bytes; cache of 512 tokens {kept * 512:,} bytes")
print(f"the cache weighs as much as the weights at {2 * weights // kept:,} tokens")
assert 2 * weights // kept > config.max_position
llm.close()

# %% [markdown]
# One read of the weights could serve many users at once. That is batching, and stage 3 begins it.

# %% [markdown]
# ## Your code serves
#
# Once an exercise is done, `--mine 2` puts your methods in the package's place, and says how often they were called:
# 2.1 and 2.2 for each layer of each step, 2.3 for each step, 2.4 once.

# %%
command = ["-m", "minisgl.stage2", "--mine", "2", "--prompt", "The capital of France is", "--max-tokens", "16"]
done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240)
print(done.stderr + done.stdout)

# %%
check("2")

# %% [markdown]
# ## Where it still loses
#
# - Room for the longest sequence is taken at the start, and one request at a time has it all: stage 3.
# - Two prompts that begin alike are both computed whole: stage 4.
# - The second request waits for the first: stages 3 and 5.
#
# The [chapter](../chapters/stage2_kv_cache/README.md) has the numbers, the other engines' names, and questions.
