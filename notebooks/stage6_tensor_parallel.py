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
# # Stage 6 · tensor parallel
#
# One model, cut over several processes that take every step together. By the end the cut, the sums and the agreement
# between the ranks are yours.
#
# Run the cells in order. Where it says **predict**, answer for yourself before you run the next cell. The text behind
# it is [the chapter](../chapters/stage6_tensor_parallel/README.md). `minisgl start 6`, in a terminal, makes
# `chapters/stage6_tensor_parallel/mine.py`, where you will write; until then the cells with `check` say that you have
# not begun.

# %%
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from IPython.display import display
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from minisgl import viz
from minisgl.benchmark.trace_cut import provenance
from minisgl.core.trace import Event, read_events
from minisgl.layers.embedding import VocabParallelEmbedding
from minisgl.layers.shard import RankHeads, shard_range
from minisgl.learn import check
from minisgl.models.blocks import GatedMLP
from minisgl.models.config import ModelConfig
from minisgl.models.registry import create_model
from minisgl.models.resolve import resolve_model
from minisgl.models.weights import ReadingPlan, allocate

folder = tempfile.TemporaryDirectory()
model_folder = resolve_model("smollm2-135m")
config = ModelConfig.from_folder(model_folder)
CPU = torch.device("cpu")


class Alone:
    """A rank without the others: what it gives to a sum comes back as it is, so that we can look at it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        return x

    def minimum(self, value: int) -> int:
        return value


# %% [markdown]
# ## What breaks today
#
# Llama 3.1 70B, from its shape alone: models are built without memory for their weights (on `meta`), so we can ask what
# a rank would hold.
#
# **Predict:** on how many devices of 80 GB do its weights fit?

# %%
llama_70b = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
)


def parameters(shape: ModelConfig, rank: int, size: int) -> dict[str, torch.nn.Parameter]:
    return dict(create_model(shape, Alone(rank, size), 64, torch.bfloat16, CPU).named_parameters())


held = {size: 2 * sum(p.numel() for p in parameters(llama_70b, 0, size).values()) for size in (1, 2, 4, 8)}
print("GB a rank:", {size: round(number / 1e9, 1) for size, number in held.items()})
assert held[1] > 80e9 > held[2]

# %%
page = 16 * 80 * 2 * 4 * 128 * 2  # 16 tokens, 80 layers, K and V, 4 of the 8 KV heads, 128 elements of 2 bytes
parts, num_pages = viz.budget_parts(0.9, 80 * 10**9, held[2], page)
assert num_pages == 550
viz.memory_budget(parts, pages=("KV pages", num_pages))

# %% [markdown]
# On two it fits, and 550 pages of 16 tokens are left: one conversation. On four a rank has 35 GB of weights, and its
# pages, of 2 KV heads, are half as large.

# %% [markdown]
# ## Exercise 6.1 · the heads of a rank
#
# From here on the model that you have: 9 q heads, 3 KV heads, 1,536 MLP columns, 49,152 tokens in the vocabulary.
#
# **Predict:** how are 9 q heads and 3 KV heads cut over two ranks? (Three q heads attend to one KV head.)

# %%
ranks = [RankHeads(config, rank, 2) for rank in range(2)]
print([(list(own.q()), list(own.kv())) for own in ranks])
assert [(len(own.q()), len(own.kv())) for own in ranks] == [(6, 2), (3, 1)]
viz.shards(config, 2)

# %% [markdown]
# Not 5 + 4: a q head and the KV head it attends to must be on the same rank, or its K and V would have to travel at
# each step. So whole groups are cut. With more ranks than KV heads these are copied:

# %%
viz.shards(config, 6)

# %%
try:
    RankHeads(config, 0, 4).kv()
except ValueError as error:
    print(error)
else:
    raise AssertionError("4 ranks cannot hold 3 KV heads evenly")

# %%
check("6.1")

# %% [markdown]
# ## Compute and communication of a layer
#
# **Predict:** two ranks. How much of the time of one does a layer's arithmetic take, if rank 0 has 6 heads of 9 and
# half of the MLP? How often do the ranks meet?


# %%
def layer_weights(shape: ModelConfig, rank: int, size: int) -> int:
    named = parameters(shape, rank, size).items()
    return sum(p.numel() for name, p in named if "layers.0." in name and "norm" not in name)


portions = [layer_weights(config, rank, 2) / layer_weights(config, 0, 1) for rank in range(2)]
print(f"rank 0 has {portions[0]:.0%} of a layer's multiply-adds, rank 1 has {portions[1]:.0%}")
assert portions[0] > 0.5 > portions[1]
viz.layer_on_ranks(config, 2)

# %% [markdown]
# They meet twice: after `o` and after `down`, and each time they wait for the fuller one. With 3 ranks nobody waits:

# %%
viz.layer_on_ranks(config, 3)

# %% [markdown]
# A decode step of one request hardly computes: it reads the rank's weights, all but the embedding, of which it needs a
# row. So what a meeting costs is counted against reading. Llama 3.1 8B on two H200s, of which each reads some 4.3 TB a
# second; the sum of one token's 4,096 values takes 14.9 µs by NCCL and 4.9 µs by a kernel of ours (measured on
# 2026-11-30: [how ranks add up](../chapters/stage6_tensor_parallel/communicators.md#which-is-the-fastest)).
#
# **Predict:** how many GB of weights does rank 0 read in a step? Which share of its time goes into the sums?

# %%
llama_8b = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
)
read = 2 * sum(p.numel() for name, p in parameters(llama_8b, 0, 2).items() if "embed_tokens" not in name)
layer = 2 * layer_weights(llama_8b, 0, 2)
sums = 2 * llama_8b.num_layers + 1
reading = read / 4.3e12
print(f"rank 0 reads {read / 1e9:.1f} GB a step, {layer / 1e9:.2f} GB a layer: {1e3 * reading:.2f} ms")
for way, micros in {"NCCL": 14.9, "one-shot": 4.9}.items():
    meeting = sums * micros / 1e6
    print(f"{sums} sums by {way}: {1e3 * meeting:.2f} ms, {meeting / (reading + meeting):.0%} of rank 0's time")
assert (round(read / 1e9, 1), round(layer / 1e9, 2), sums) == (7.5, 0.22, 65)

# %% [markdown]
# One rank alone would read 15 GB, in 3.5 ms: two are faster, and not twice as fast. (The number leaves out attention,
# sampling and the launches, so a real step's share is smaller.)

# %% [markdown]
# ### What was recorded
#
# A decode step of that model on two H200s, by torch's profiler: 64 requests, the whole step one CUDA graph. Between two
# meetings all kernels are one bar, and the pale part of a meeting is what a rank waits in it until the other has come.
#
# **Predict:** which of the two parts of a layer takes longer? Does a rank wait, where both have the same shares?

# %%
DATA = Path("data")


def layers(step: str, ranks: str, data: Path = DATA) -> list[Event]:
    return read_events(data / f"stage6-layers-{step}-{ranks}.json")


origin = provenance(DATA / "stage6-layers-decode-64-tp2-nccl.json")
print(origin["machine"], origin["date"], origin["versions"], origin["command"], sep=" · ")
decode = layers("decode-64", "tp2-nccl")
for rank in range(2):
    assert sum(event.name == "all-reduce" and event.rank == rank for event in decode) == sums
viz.recorded_layers(decode)

# %% [markdown]
# The MLP's weights are four times those of attention; but attention has K and V of 64 requests to read besides. With
# equal shares a rank still waits a microsecond or two: no two launches and no two memories are quite alike.
#
# So much for two layers. **Predict:** how much of a step does the second rank save? How much of the rest is sums?

# %%
WAYS = {"1 rank": "tp1", "2 ranks, NCCL": "tp2-nccl", "2 ranks, our kernel": "tp2-symm"}


def parts(step: str, data: Path = DATA) -> dict[str, dict[str, float]]:
    return {name: viz.step_parts(layers(step, ranks, data)) for name, ranks in WAYS.items()}


def title(of_step: dict[str, dict[str, float]]) -> str:
    whole = [1e3 * sum(times.values()) for times in of_step.values()]
    share = [times["communication"] / sum(times.values()) for times in of_step.values()]
    times = f"{whole[0]:.1f} ms become {whole[1]:.1f} (NCCL) or {whole[2]:.1f} (ours)"
    return f"{times}, of which {100 * share[1]:.0f}\u00a0% or {100 * share[2]:.0f}\u00a0% are sums"


found = parts("decode-64")
one, nccl, ours = found.values()
assert nccl["compute"] < 0.65 * one["compute"]
assert sum(ours.values()) < sum(nccl.values()) < sum(one.values())
viz.time_parts(found, title=title(found))

# %% [markdown]
# (One rank's bar begins with the copies before its graph, in which the device waits for its host. The other bars begin
# when the ranks have met for the first time.)
#
# Each has 58 % of the work, not half: norms, for one, are computed on both. A sum takes NCCL 9.4 µs and our kernel 6.7.
# And in a step of 2,048 prompt tokens? A sum is of 16 MiB then, and takes 64 to 75 µs: it is no longer latency, and the
# links between the GPUs set the pace of either way.

# %%
prefill = parts("prefill")
assert prefill["2 ranks, NCCL"]["communication"] > 5 * nccl["communication"]
viz.time_parts(prefill, title=title(prefill))

# %% [markdown]
# To record the same on two GPUs of your own (some two minutes; a model's shapes with random weights, 16 GB):

# %%
if torch.cuda.device_count() >= 2:
    with tempfile.TemporaryDirectory() as fresh:
        command = ["-m", "minisgl.benchmark", "record-trace", "layers", "--model", "llama-3.1-8b", "--tp", "2"]
        subprocess.run([sys.executable, *command, "--out", fresh], check=True, timeout=600)
        display(viz.recorded_layers(layers("decode-64", "tp2-nccl", Path(fresh))))
        display(viz.time_parts(parts("decode-64", Path(fresh))))
else:
    print("no two GPUs here")

# %% [markdown]
# ## Exercise 6.2 · what a rank reads
#
# In the checkpoint q, k and v are three tensors, whole. In a rank they are one parameter.
#
# **Predict:** which rows of `k_proj` (192 rows: 3 heads of 64) does rank 1 of 2 read, and where in its `qkv_proj` do
# they go?

# %%
plans = [ReadingPlan(config, rank, 2) for rank in range(2)]
prefix = "model.layers.0.self_attn."
for name, piece in plans[1].parts(f"{prefix}qkv_proj.weight", prefix, "qkv_proj", "weight"):
    print(f"{name}: rows {piece.source.start} to {piece.source.stop - 1} of {piece.total}, to row {piece.offset}")
k_piece = dict(plans[1].parts(f"{prefix}qkv_proj.weight", prefix, "qkv_proj", "weight"))[f"{prefix}k_proj.weight"]
assert (list(k_piece.source), k_piece.offset) == (list(range(128, 192)), 192)

# %% [markdown]
# Together the ranks read the whole model once, and the norms twice.

# %%
whole = sum(p.numel() for p in parameters(config, 0, 1).values())
norms = sum(p.numel() for name, p in parameters(config, 0, 1).items() if "norm" in name)
shares = [sum(p.numel() for p in parameters(config, rank, 2).values()) for rank in range(2)]
print(f"{whole:,} = {shares[0]:,} + {shares[1]:,} - {norms:,}")
assert sum(shares) == whole + norms

# %%
check("6.2")

# %% [markdown]
# ## Exercise 6.3 · add up what is cut by rows
#
# The MLP of layer 0, whole and on two ranks, filled by the plan from the model's file. `down_proj` is row parallel:
# each rank has a term for every element of the result.
#
# **Predict:** the sum of the two terms, against the MLP of one rank?


# %%
def mlp(rank: int, size: int) -> GatedMLP:
    with torch.device("meta"):
        layer = GatedMLP(config, Alone(rank, size))
    allocate(layer, torch.float32, CPU)
    named = {f"model.layers.0.mlp.{name}": parameter for name, parameter in layer.named_parameters()}
    with safe_open(model_folder / "model.safetensors", framework="pt") as file:
        for parameter_name, parameter in named.items():
            for name, piece in ReadingPlan(config, rank, size).pieces(parameter_name, parameter):
                piece.destination(named).copy_(piece.read(file.get_slice(name)))
    return layer


x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))
with torch.inference_mode():
    together = mlp(0, 1)(x)  # [tokens, hidden]
    terms = [mlp(rank, 2)(x) for rank in range(2)]
largest = float(together.abs().max())
differ = {"the sum": terms[0] + terms[1] - together, "a term alone": terms[0] - together}
print({name: f"{float(rest.abs().max()) / largest:.0e} of the largest value" for name, rest in differ.items()})
torch.testing.assert_close(terms[0] + terms[1], together, atol=1e-5 * largest, rtol=0)

# %% [markdown]
# The same but for the last bits: two halves are added in another order than a whole.

# %%
check("6.3")

# %% [markdown]
# ## Exercise 6.4 · embed a vocabulary that is cut
#
# A vocabulary of 7 on two ranks; the row of id 5 is (5, 50).
#
# **Predict:** what does each rank give to the sum for the ids 3, 4, 6?

# %%
ids, given = torch.tensor([3, 4, 6], dtype=torch.int32), []
for rank in range(2):
    layer = VocabParallelEmbedding(7, 2, Alone(rank, 2)).requires_grad_(False)
    layer.weight.data = torch.tensor([[i, 10.0 * i] for i in shard_range(7, rank, 2)])
    given.append(layer(ids))
    print(f"rank {rank} has ids {list(layer.vocab_range)} and gives {given[rank].tolist()}")
assert (given[0] + given[1]).tolist() == [[3, 30], [4, 40], [6, 60]]

# %%
check("6.4")

# %% [markdown]
# ## Exercise 6.5 · gather the logits
#
# (Its text is with [how ranks add up](../chapters/stage6_tensor_parallel/communicators.md#gathering).)
#
# The logits of two requests, a and b, 4 on rank 0 and 3 on rank 1. A gather brings both shards to every rank, one after
# the other, the smaller one padded.
#
# **Predict:** what does it give to read that memory as two rows?

# %%
shards = [torch.tensor([[10.0, 11, 12, 13], [20, 21, 22, 23]]), torch.tensor([[14.0, 15, 16], [24, 25, 26]])]
gathered = torch.stack([F.pad(shard, (0, 4 - shard.shape[1]), value=-1) for shard in shards])  # [ranks, rows, widest]
print("as rows:   ", gathered.view(2, -1).tolist())
print("as columns:", torch.cat([gathered[0, :, :4], gathered[1, :, :3]], dim=1).tolist())
assert gathered.view(2, -1)[0, 4:].tolist() == [20, 21, 22, 23], "the first request got the second one's logits"
one = gathered[:, :1].reshape(1, -1)
print("one request, as rows:", one.tolist())

# %% [markdown]
# With one request both are right, but for the padding. With two the first row has half of the second's logits.
#
# (Whole rows are gathered for top-k, top-p, min-p, penalties and logprobs. A greedy token, or one drawn from the whole
# vocabulary, needs each rank's best alone: two numbers a row, gathered in the same way.)

# %%
check("6.5")

# %% [markdown]
# ## Exercise 6.6 · ranks in lock step
#
# (Its text is [a page of its own](../chapters/stage6_tensor_parallel/ranks.md).)
#
# Now two real processes, and a trace that both write. They compute on GPUs if there are two, else both on the CPU.
#
# **Predict:** no rank tells another what to run. What will their schedulers have in common?

# %%
DEVICE = "auto" if torch.cuda.device_count() >= 2 else "cpu"
PROMPTS = ("The capital of France is", "The first ten numbers are one, two, three", "Water boils at")


def serve(*flags: str) -> str:
    command = [sys.executable, "-m", "minisgl.stage6", "--device", DEVICE, "--max-tokens", "16", *flags]
    for prompt in PROMPTS:
        command += ["--prompt", prompt]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.stderr + done.stdout


def traced(tp: int) -> list[Event]:
    trace = Path(folder.name) / f"{tp}.json"
    said = serve("--tp", str(tp), "--ignore-eos", "--trace", str(trace))
    assert trace.exists(), said
    return read_events(trace)


runs = {tp: traced(tp) for tp in (1, 2)}
plans_made = [[e.args for e in runs[2] if e.name == "schedule" and e.rank == rank] for rank in range(2)]
pages = [[e.args for e in runs[2] if e.name == "row_pages" and e.rank == rank] for rank in range(2)]
print(len(plans_made[0]), "steps on each rank; the first:", plans_made[0][0])
assert plans_made[0] == plans_made[1], "a rank made another batch"
assert pages[0] == pages[1], "a rank used other pages"
forwards = [[e for e in runs[2] if e.name == "forward" and e.rank == rank] for rank in range(2)]
for one, other in zip(*forwards, strict=True):
    assert max(one.ts, other.ts) < min(e.ts + (e.duration or 0) for e in (one, other)), "a rank went on alone"
viz.timeline(runs[2], first=3, count=6, title="No rank ends a step before the other has begun it")

# %% [markdown]
# Every batch and every page is the same on both, decided twice (the schedulers' lanes are all but empty: that takes
# half a millisecond). Neither gets through a layer without the other.
#
# All that has to be agreed on is where one step's orders end. Rank 0 says how many messages it has, and rank 1 takes
# as many.

# %%
check("6.6")

# %% [markdown]
# ## Where it loses
#
# The same requests on one rank and on two.
#
# **Predict:** on one machine's cores, which is faster?

# %%
steps = {f"{tp} rank{'s' * (tp > 1)}": viz.step_seconds(events)[1:] for tp, events in runs.items()}
assert [len(seconds) for seconds in steps.values()] == [15, 15]
alone, shared = map(statistics.median, steps.values())
where = "two GPUs" if DEVICE == "auto" else "the cores of one machine"
title = f"Two ranks on {where}: a decode step takes {shared / alone:.1f} times as long"
viz.distribution(steps, quantity="time of a decode step", title=title)

# %% [markdown]
# On a CPU the two ranks share what one had, and wait for each other 61 times a step: whichever has to wait for a core
# keeps the other waiting, too. On two GPUs each has a memory of its own to read from, and it pays: [the
# chapter](../chapters/stage6_tensor_parallel/README.md) has numbers.

# %% [markdown]
# ## Your code serves
#
# Once an exercise is done, `--mine 6` puts your methods in the package's place, in both processes.

# %%
print(serve("--tp", "2", "--mine", "6"))

# %%
check("6")

# %% [markdown]
# ## What is left
#
# - Each step still waits for Python: scheduling, then the device, then scheduling again. Stage 7.
# - A model with experts is cut by the same rule: [mixture of experts](../chapters/stage6_tensor_parallel/experts.md).
