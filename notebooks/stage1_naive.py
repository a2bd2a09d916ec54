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
# # Stage 1 · naive
#
# A model gives a score to every token of its vocabulary. By the end of this notebook that is a program that
# answers a prompt, five pieces of it in your own code, and you will have seen why nobody serves this way.
#
# Run the cells in order. Where it says **predict**, answer for yourself before you run the next cell. The text
# behind it is [the chapter](../chapters/stage1_naive/README.md).

# %%
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from minisgl import SamplingParams, viz
from minisgl.core.trace import read_events
from minisgl.layers.norm import RMSNorm
from minisgl.learn import check
from minisgl.stage1.llm import LLM

trace = Path(tempfile.mkdtemp()) / "trace.json"
llm = LLM("smollm2-135m", dtype="float32", trace=str(trace))

# %% [markdown]
# `minisgl start 1`, in a terminal, makes `chapters/stage1_naive/mine.py`, where you will write. Until then the
# cells with `check` say that you have not begun, and all others run.

# %% [markdown]
# ## A model is a function
#
# Text becomes ids. The model takes ids, and returns a score (a *logit*) for each token that could come next.

# %%
ids = llm.tokenizer.encode("The capital of France is")
print(ids, [llm.tokenizer.decode([i]) for i in ids])


def logits_after(ids: list[int]) -> torch.Tensor:
    """One forward over all ids: the logits of the last row, [vocab]."""
    with torch.inference_mode():
        return llm.model(llm._context(torch.tensor(ids, dtype=torch.int32)))[0]


logits = logits_after(ids)
print(logits.shape, "one score a token; the highest:", repr(llm.tokenizer.decode([int(logits.argmax())])))

# %% [markdown]
# **Predict:** how sure is the model? Is the second likeliest token another city?

# %%
best = int(logits.argmax())
assert llm.tokenizer.decode([best]) == " Paris"
viz.logits_to_token(logits, SamplingParams(), llm.tokenizer.decode, chosen=best)

# %% [markdown]
# Take the best token, append it, and ask again: a text. This is all that "generating" means.

# %%
text = list(ids)
for _ in range(8):
    text.append(int(logits_after(text).argmax()))
print(repr(llm.tokenizer.decode(text)))
assert text[len(ids) :] == llm.generate([ids], SamplingParams(max_tokens=8))[0].token_ids

# %% [markdown]
# ## Exercise 1.1 · what is inside: the norm
#
# Each of the 30 layers first brings every token's vector to one scale: `x / √(mean(x²) + eps) × weight`.
#
# **Predict:** the norm of `[3, 4, 3, 4]` with weight 1. And of the same, times 100?

# %%
norm = RMSNorm(4, eps=0.0).requires_grad_(False)
norm.weight.fill_(1.0)
x = torch.tensor([[3.0, 4.0, 3.0, 4.0], [300.0, 400.0, 300.0, 400.0]])
print(norm(x))
torch.testing.assert_close(norm(x)[0], x[0] / math.sqrt(12.5))
torch.testing.assert_close(norm(x)[0], norm(x)[1])

# %% [markdown]
# **Exercise 1.1**: write it, in `mine.py`. ([What it must do](../chapters/stage1_naive/README.md#rmsnorm);
# `minisgl hint 1.1`.)

# %%
check("1.1")

# %% [markdown]
# ## Exercise 1.2 · where am I: the rotation
#
# Attention compares a query and a key by their dot product, which knows no order. RoPE turns pairs of each by an
# angle that grows with the position.
#
# **Predict:** a query at position 7 and a key at 3 have some score. At 107 and 103?

# %%
generator = torch.Generator().manual_seed(0)
query, key = torch.randn(2, 1, 1, 64, generator=generator)
rotary = llm.model.model.rotary_emb


def score(query_position: int, key_position: int) -> float:
    q = rotary(torch.tensor([query_position])).apply(query)  # [1, 1, 64]
    k = rotary(torch.tensor([key_position])).apply(key)
    return float((q * k).sum())


for places in ((7, 3), (107, 103), (3, 7), (7, 4)):
    print(places, f"{score(*places):.3f}")
assert math.isclose(score(7, 3), score(107, 103), abs_tol=1e-2)
assert not math.isclose(score(7, 3), score(7, 4), abs_tol=1e-1)

# %% [markdown]
# **Exercise 1.2**: turn a head. ([How the pairs lie](../chapters/stage1_naive/README.md#rope).)

# %%
check("1.2")

# %% [markdown]
# ## Exercise 1.3 · who listens to whom: attention
#
# Three tokens, one head of size 1; the keys are 0, ln 2, ln 4 and the values 10, 20, 40.
#
# **Predict:** token 0 sees only itself. What comes out for it? And is the result of token 2 nearer to 10 or to
# 40?

# %%
q = torch.ones(3, 1, 1)
k = torch.tensor([1.0, 2.0, 4.0]).log().view(3, 1, 1)
v = torch.tensor([10.0, 20.0, 40.0]).view(3, 1, 1)
out = llm.attention.attend(q, k, v).flatten()
print(out)
torch.testing.assert_close(out, torch.tensor([10.0, 50 / 3, 30.0]))

# %% [markdown]
# The real layers have 9 query heads and 3 KV heads: three queries in a row share one key and value.

# %%
q, k = torch.zeros(1, 9, 64), torch.zeros(1, 3, 64)
v = torch.tensor([0.0, 1.0, 2.0]).view(1, 3, 1).expand(1, 3, 64)  # KV head h holds h
shares = llm.attention.attend(q, k, v)[0, :, 0].int().tolist()
print("query head 0 … 8 reads KV head", shares)
assert shares == [0, 0, 0, 1, 1, 1, 2, 2, 2]

# %% [markdown]
# **Exercise 1.3**: grouped-query attention, the longest one.
# ([Shapes](../chapters/stage1_naive/README.md#attention).)

# %%
check("1.3")

# %% [markdown]
# ## Exercise 1.4 · from scores to a token: sampling
#
# `The capital of France is` has one good answer. `My favourite colour is` has many, and taking the likeliest each
# time would be dull.
#
# **Predict:** of 49,152 tokens, how many does top-p 0.5 leave here?

# %%
colour = logits_after(llm.tokenizer.encode("My favourite colour is"))
probabilities = (colour / 0.8).softmax(0).sort(descending=True).values
kept = 1 + int((probabilities.cumsum(0) < 0.5).sum())  # the fewest that hold half of the mass
print(kept, "tokens hold half of the probability")
assert 1 < kept < 50
viz.logits_to_token(colour, SamplingParams(temperature=0.8, top_p=0.5), llm.tokenizer.decode)

# %% [markdown]
# A seed makes an answer repeatable: each draw depends on the seed and the position, and on nothing else.

# %%
texts = []
for seed in (1, 2, 1):
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=7)
    texts.append(llm.generate("My cat likes to", params)[0].text)
    print(seed, repr(texts[-1]))
assert texts[0] == texts[2] != texts[1]

# %% [markdown]
# **Exercise 1.4**: the two thresholds. ([A table to check yourself
# by](../chapters/stage1_naive/README.md#sampling).)

# %%
check("1.4")

# %% [markdown]
# ## Exercise 1.5 · the loop, and its bill
#
# `llm.generate` is the loop that you wrote above in two lines, for requests with an end. A prompt of 8 tokens, an
# answer of 80.
#
# **Predict:** how many tokens go through the model in all? (The first step computes 8 …)

# %%
prompt = llm.tokenizer.encode("Large language models answer one token at a")
assert len(prompt) == 8
computed = []
hook = llm.model.model.embed_tokens.register_forward_pre_hook(lambda module, args: computed.append(len(args[0])))
(answer,) = llm.generate([prompt], SamplingParams(max_tokens=80, ignore_eos=True))
hook.remove()
print(computed[:3], "…", computed[-1], " sum:", f"{sum(computed):,}")
assert computed == list(range(8, 88))
assert sum(computed) == 3800
print(f"64 + 64 tokens would be {sum(range(64, 128)):,}: what the tests assert, and stage 2 has to beat")

# %% [markdown]
# Each step computes the prompt and all of the answer so far, though only one of these tokens is new. The trace of the
# run, beside what would have been enough:

# %%
llm.close()  # writes the trace
events = read_events(trace)
uid = max(event.uid for event in events if event.uid is not None)  # the last request
steps = viz.step_tokens(events, uid)
new = [8] + [1] * 79  # the prompt, then one token a step
assert steps == computed
assert sum(new) == 87
title = "80 new tokens cost 3,800: each step computes all that came before it"
viz.cost_triangles({"stage 1": steps, "what is new": new}, title=title)

# %% [markdown]
# **Predict:** how does the time of a step develop?

# %%
seconds = viz.step_seconds(events, uid)
assert len(seconds) == 80
viz.time_per_token({"stage 1": seconds})

# %% [markdown]
# A step takes longer with each token that it computes. (Where other programs work beside it, the dots scatter.) The
# 1,000th step of this answer would compute 1,007 tokens. But what is computed again comes out the same each time, since
# a token sees only those before it. So it can be kept: that is stage 2.
#
# **Exercise 1.5**: the loop. ([By hand](../chapters/stage1_naive/README.md#by-hand), and [what it must
# do](../chapters/stage1_naive/README.md#the-loop).)

# %%
check("1.5")

# %% [markdown]
# ## Your code serves
#
# The same program with your methods in the place of the package's, in a process of its own. Its last lines say
# how often each was called.


# %%
def run(*arguments: str) -> None:
    """A command, its output and its errors."""
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120)
    print(done.stdout + done.stderr)


run("minisgl.stage1", "--mine", "1", "--chat", "--prompt", "What is 2+2?", "--max-tokens", "16")
