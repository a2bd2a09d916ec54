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
# # Stage 7 · overlap and CUDA graphs
#
# Until now host and device take turns: while one works, the other waits. Here the host works on the next step while
# the device computes this one, and a decode step is asked for with one call instead of hundreds. By the end the loop
# is yours.
#
# Run the cells in order. Where it says **predict**, answer for yourself before you run the next cell. The text behind
# it is [the chapter](../chapters/stage7_overlap/README.md). `minisgl start 7`, in a terminal, makes
# `chapters/stage7_overlap/mine.py`, where you will write; until then the cells with `check` say that you have not
# begun. No GPU is needed: where its times matter, a clock of our own or recorded numbers stand in for it, and it is
# said.

# %%
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from IPython.display import display
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl import SamplingParams, viz
from minisgl.attention.paged_rows import RecordedRows, paged_rows
from minisgl.benchmark.arrivals import Arrival, Segment
from minisgl.benchmark.simulate import model_config
from minisgl.benchmark.simulation import serve, simulate
from minisgl.core.batch import Batch
from minisgl.core.req import Req
from minisgl.core.trace import read_events
from minisgl.learn import check
from minisgl.stage3.page_table import PageTable
from minisgl.stage5.cost_model import H200, CostModel
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage5.simulated_engine import SimulatedEngine, VirtualClock, VirtualTracer
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.graph_runner import GraphRunner, graph_sizes
from minisgl.stage7.llm import LLM

folder = tempfile.TemporaryDirectory()
RECORDS = Path("../minisgl/benchmark/results")
DATA = Path("data")
QWEN = model_config("qwen3-0.6b")

# %% [markdown]
# ## What breaks today
#
# 64 requests decode. The scheduler and the loops are the real ones, the engine has no weights: a step moves a clock by
# what the cost model says of an H200 and a model of 0.6 billion parameters
# ([where its constants come from](../minisgl/stage5/cost_model.py)).
#
# **Predict:** the host needs 2.2 ms to prepare a step, the device 2.6 to compute it. How long is a step if they take
# turns? How long can it be at best?

# %%
arrivals = [Arrival(uid, (Segment(2 * uid, 512),), output_len=64, time_ns=0) for uid in range(64)]
runs = {"plain": True, "overlap": False}
events = {}
for name, disable_overlap in runs.items():
    trace = Path(folder.name) / f"{name}.json"
    config = OverlapConfig(
        max_running_requests=64,
        max_prefill_length=16384,
        schedule_policy="prefill-first",
        disable_overlap=disable_overlap,
    )
    simulate(arrivals, config, QWEN, H200, trace)
    events[name] = [event for event in read_events(trace) if event.track in ("scheduler", "device")]


def decode_steps(name):
    return [event for event in events[name] if event.track == "device" and event.name == "decode"]


def apart(name):
    """Milliseconds from the middle of the run: a step's start to the next one's."""
    steps = decode_steps(name)
    return (steps[40].ts - steps[30].ts) / 10 / 1e6


host = [(e.duration or 0) / 1e6 for e in events["plain"] if e.name == "schedule" and e.args["phase"] == "decode"][35]
device = (decode_steps("plain")[35].duration or 0) / 1e6
print(f"host {host:.2f} ms, device {device:.2f} ms; a step takes", {name: round(apart(name), 2) for name in runs}, "ms")
assert abs(apart("plain") - (host + device)) < 0.02
assert abs(apart("overlap") - max(host, device)) < 0.02
viz.timeline({name: [event for event in run if event.duration] for name, run in events.items()}, first=32, count=5)

# %% [markdown]
# The sum becomes the larger of the two. Look at the lower picture: while the device computes a step, the host prepares
# the next one, and only then waits. So the next step is launched *before* the tokens of this one are known. Three
# things make that possible, and they are the first three exercises: the order of the loop, tokens that reach the next
# step without the host, and nothing given away that a step on its way may still write to.

# %% [markdown]
# ## Exercise 7.1 · the order of the overlap loop
#
# Both loops call the same three: `schedule`, `forward` and `commit`. Here is what they did, from the trace: `c` is a
# commit.
#
# **Predict:** the order of schedule (s), launch (l) and commit of the steps 3 to 5, in the loop with overlap.


# %%
def order(name, count=9):
    """The host's calls, in the order in which they ended, from the middle of the run."""
    letters = {"schedule": "s", "launch": "l", "commit": "c"}
    calls = [event for event in events[name] if event.track == "scheduler" and event.name in letters]
    calls.sort(key=lambda call: call.ts + call.duration)  # on this clock a commit takes no time
    return " ".join(letters[call.name] for call in calls[41 : 41 + count])


print("overlap:", order("overlap"))
waits = [event for event in events["overlap"] if event.name == "wait"]
assert sorted(set(order("overlap").split())) == ["c", "l", "s"]
assert len(waits) == len(decode_steps("overlap")) + sum(event.name == "prefill" for event in events["overlap"])

# %% [markdown]
# `s l c`: schedule N, launch N, commit N − 1. The trace cannot say which step a commit is of; your tests can.

# %%
check("7.1")

# %% [markdown]
# ## On a real device, which here is a thread
#
# A GPU has streams. On a CPU a worker thread plays the stream, and the overlap is real: torch lets go of Python's lock
# while it computes. The built-in model, 8 requests, with and without.
#
# **Predict:** how much of the time does the engine wait in the plain loop? (A step takes some 30 ms on a laptop, and
# the host's part of it about 1.)

# %%
params = SamplingParams(max_tokens=10, ignore_eos=True)
prompts = [f"Write a sentence about the number {number}." for number in range(8)]
real, answers = {}, {}
for name, disable_overlap in runs.items():
    trace = Path(folder.name) / f"real-{name}.json"
    with LLM("smollm2-135m", max_seq_len=256, disable_overlap=disable_overlap, trace=str(trace)) as llm:
        answers[name] = [completion.token_ids for completion in llm.generate(prompts, params)]
    real[name] = read_events(trace)


def scheduled_early(name):
    """Steps that had not ended when the next was being scheduled."""
    starts = {e.args["step"]: e.ts for e in real[name] if e.name == "schedule"}
    ends = {e.args["step"]: e.ts + (e.duration or 0) for e in real[name] if e.name == "forward"}
    return sum(starts[step + 1] < end for step, end in ends.items() if step + 1 in starts)


print({name: scheduled_early(name) for name in runs}, "times the next step was scheduled before this one ended")
assert answers["plain"] == answers["overlap"]
assert scheduled_early("plain") == 0
assert scheduled_early("overlap") > 5
total = len(answers["overlap"][0])
viz.timeline(
    real,
    count=6,
    title="The next step is scheduled before this one ends: "
    f"{scheduled_early('overlap')} times in {total} with overlap, never without",
)

# %% [markdown]
# The answers are the same, and the last step has no next one. The plain loop's engine waits for a percent or two of
# the time: on a CPU there is little to hide, which is the chapter's *where it loses*. (In the committed figure other
# work took the cores away now and then: look at the order, not at the lengths.)

# %% [markdown]
# ## Exercise 7.2 · where a sampled token goes
#
# Step N + 1 is launched before the host has seen the token of step N. It reads it on the device: from the **token
# pool**, where step N has written it. The host decides only *where*. Here calls are made by hand, and nothing is
# committed.
#
# **Predict:** request 0 has 5 tokens, of which a step computes 4 at most, and may make 2. Where does the token of each
# step go?

# %%
clock = VirtualClock()
tracer = VirtualTracer(None, clock)
config = OverlapConfig(page_size=4, num_pages=16, max_running_requests=3, max_prefill_length=4)
engine = SimulatedEngine(config, CostModel(QWEN, H200), 32, tracer)
scheduler = Scheduler(config, engine, frozenset(), tracer)
scheduler.add(0, [101, 102, 103, 104, 105], SamplingParams(max_tokens=2))


def launch():
    forward_input = scheduler.schedule()
    rows, positions = (index.tolist() for index in forward_input.write_tuple)
    print("writes to", list(zip(rows, positions, strict=True)))
    return forward_input, scheduler.forward(forward_input)


in_flight = [launch(), launch(), launch()]
req = scheduler.decode.running[0]
pool = scheduler.tables.token_pool
print("the host knows", req.input_ids.tolist())
print("the pool holds", pool[0, :7].tolist())
assert len(req.input_ids) == 5
assert (pool[0, 5:7] > 0).all()
assert scheduler.schedule() is None

# %% [markdown]
# Three steps are in flight (the loop has two at most), and the host knows none of their tokens. The first step was a
# chunk of the prompt: what is sampled of it is nobody's, and goes to the dummy row, 3, the last.

# %%
check("7.2")

# %% [markdown]
# ## Exercise 7.3 · when a row may be reused
#
# Now the user goes away: request 0 is aborted while its three steps are in flight.
#
# **Predict:** how many rows are free after the abort, and after each of the three commits? There are three in all.

# %%
free = []
print(scheduler.abort(0))
free.append(scheduler.tables.num_free)
for step in in_flight:
    assert scheduler.commit(*step) == []
    free.append(scheduler.tables.num_free)
print("free rows:", free, "· pages", scheduler.stats()["pages_free"] + scheduler.stats()["pages_cached"])
assert free == [2, 2, 2, 3]
scheduler.check_integrity()

# %% [markdown]
# `req.in_flight` counts the steps that are launched and not yet committed. Until it is 0 nothing comes back, whether
# the request was aborted, ended or was retracted: a row that has a new owner would be written over by the old one's
# steps.

# %%
check("7.3")

# %% [markdown]
# ## The launch tax
#
# The host asks the device for each operation by itself. How many are there in a decode step? We count them in the
# built-in model's plain torch: all but views, which compute nothing, and casts.
#
# **Predict:** how many, for 30 layers?


# %%
class Counted(TorchDispatchMode):
    """Counts what would be a kernel on a GPU, or more."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = [result.alias_info for result in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        self.count += not is_view
        return func(*args, **(kwargs or {}))


counts = []
with LLM("smollm2-135m", max_seq_len=256, disable_overlap=True, device="cpu") as llm:
    layers = llm.model_config.num_layers
    for tokens in (3, 4):
        with Counted() as counted:
            llm.generate("Once upon a time", SamplingParams(max_tokens=tokens, ignore_eos=True))
        counts.append(counted.count)
operations = counts[1] - counts[0]

x = torch.ones(1)
start = time.perf_counter()
for _ in range(20_000):
    x.add_(1)
asking = (time.perf_counter() - start) / 20_000
print(f"{operations} operations a decode step, {operations / layers:.0f} a layer")
print(f"here torch takes {asking * 1e6:.1f} µs to be asked for one that has nothing to do")
assert operations > 10 * layers

# %% [markdown]
# To launch a kernel takes the host 4 to 6 µs ([others measured it](https://susun-blog.com/blog/pegainfer-3-cuda-graph)),
# beside torch's own way to it. What the device has to do in the meantime is at least to read the weights and K and V:
# that floor was recorded, on one H200, for Qwen3-0.6B's 28 layers and 1, 16, 64 and 256 requests.
#
# **Predict:** which of the four waits for launches?

# %%
records = [json.loads(line) for line in (RECORDS / "decode_step.jsonl").read_text().splitlines()]
records = [record for record in records if record["model"] == "qwen3-0.6b" and record["tp"] == 1]


def newest(metric):
    """Seconds, by batch."""
    of = {int(r["setting"].split()[0][6:]): r["value"] / 1e3 for r in records if r["metric"] == metric}
    return dict(sorted(of.items()))


floor, measured = newest("floor"), newest("step_p50")
kernels = round(operations / layers * 28)
asked = kernels * 5e-6
bars = {f"batch of {batch}": (busy, max(busy, asked)) for batch, busy in floor.items()}
waiting = [f"{100 * (1 - busy / whole):.0f}\u00a0% ({batch})" for batch, (busy, whole) in bars.items()]
print(records[-1]["machine"], records[-1]["date"], "·", records[-1]["command"])
print(f"{kernels} kernels of 5 µs: {asked * 1e3:.1f} ms")
for batch, busy in floor.items():
    print(f"batch of {batch}: floor {busy * 1e3:.2f} ms, recorded step (one graph) {measured[batch] * 1e3:.2f} ms")
assert bars["batch of 1"][0] < asked / 2
assert bars["batch of 256"][0] == bars["batch of 256"][1]
viz.launch_tax(bars, title=f"Launched one by one, kernels keep the device waiting: {', '.join(waiting)}")

# %% [markdown]
# The launches are what plain torch would need, one by one. The recorded steps had two remedies: **fewer kernels** ([a
# page of its own](../chapters/stage7_overlap/kernels.md)) and **one launch for all of them**, a CUDA graph. At 5 µs a
# large batch would need neither: its device is busy for longer than the host takes to ask. (From Python a launch costs
# ten times as much, as you will see.)

# %% [markdown]
# ## Exercise 7.4 · pad to a graph
#
# (The text of this exercise and the next is [a page of its own](../chapters/stage7_overlap/graphs.md).)
#
# A graph repeats what was recorded, with the same shapes. So some batch sizes are recorded, and a batch is padded up
# to the next of them with dummy requests. Requests with answers of 1 to 40 tokens, on a simulated engine whose batches
# are padded.
#
# **Predict:** the recorded sizes up to 40. How many dummies has a batch of 33? Of 3?

# %%
print(sizes := graph_sizes(40))


class RecordedEngine(SimulatedEngine):
    """As a GraphEngine it pads; as a simulated one it computes nothing."""

    pad = GraphRunner.pad
    _sizes = sizes

    @property
    def _dummy_req(self):
        return self.dummy_req


clock = VirtualClock()
trace = Path(folder.name) / "padded.json"
tracer = VirtualTracer(trace, clock)
config = OverlapConfig(max_running_requests=40, max_prefill_length=4096, disable_overlap=True)
engine = RecordedEngine(config, CostModel(QWEN, H200), 128, tracer)
padded = [Arrival(uid, (Segment(2 * uid, 1),), output_len=uid + 1, time_ns=0) for uid in range(40)]
serve(engine, padded, config, tracer)
tracer.close()
found = read_events(trace)
steps = [step for step in viz.steps(found) if step.extend == 0]
print("decode and padding of each step:", [(step.decode, step.padding) for step in steps])
assert all(step.decode + step.padding in sizes for step in steps)
assert {step.decode: step.padding for step in steps}[33] == 7
assert {step.decode: step.padding for step in steps}[3] == 1
dummies = sum(step.padding for step in steps) / sum(step.decode + step.padding for step in steps)
viz.batch_composition(found, title=f"A batch that shrinks from 40 to 1: {100 * dummies:.0f} % of the rows are dummies")

# %% [markdown]
# The first step is the prompts': it is in no graph of this kind. The dummies cost next to nothing where a step is
# bound by reading weights, and their K and V go to the dummy page.

# %%
check("7.4")

# %% [markdown]
# ## Exercise 7.5 · replay a graph
#
# A recorded graph reads and writes **fixed addresses**. A step is copied into the tensors that were there when it was
# recorded. These are the attention backend's own: lengths, and each row's pages. Pages of 4; 3 requests in a graph of
# 4.
#
# **Predict:** what is in the buffers for the fourth row? And after a smaller step, what is left of the larger one?

# %%
table = PageTable(num_rows=4, max_seq_len=32, page_size=4, dummy_slot=64, device=torch.device("cpu"))
buffers = RecordedRows(max_size=4, page_table=table.device, page_size=4)
dummy = Req(-1, torch.zeros(1, dtype=torch.int32), SamplingParams(max_tokens=1), table_idx=4)
graph_reads = buffers.first(4)
address = graph_reads.pages.data_ptr()


def decoding(row, tokens, first_page):
    req = Req(row, torch.zeros(tokens, dtype=torch.int32), SamplingParams(max_tokens=9), row)
    table.assign([req], torch.arange(first_page, first_page + table.pages_needed(req), dtype=torch.int32))
    req.cached_len = tokens - 1
    return req


def fill(reqs):
    batch = Batch(reqs, num_decode=len(reqs))
    batch.padded_reqs = reqs + [dummy] * (4 - len(reqs))
    buffers.fill(batch, paged_rows(batch.padded_reqs, table.device, 4))
    print("lengths", graph_reads.lengths.tolist(), "· pages", graph_reads.pages[:, :3].tolist())


reqs = [decoding(0, 12, 0), decoding(1, 5, 3), decoding(2, 9, 5)]
fill(reqs)
fill(reqs[1:2])
assert graph_reads.lengths.tolist() == [5, 1, 1, 1]
assert graph_reads.pages[1:, 0].tolist() == [16, 16, 16]
assert graph_reads.pages.data_ptr() == address

# %% [markdown]
# The graph's tensors never moved. The dummies read and write page 16, behind the pool's 16 pages. The third column
# still holds what the larger step left; no row is long enough to read it. Had we copied only the real request's row,
# the other three would have had lengths and pages of requests that may be gone.

# %%
check("7.5")

# %% [markdown]
# ## On one H200, recorded
#
# The real thing: Qwen3-0.6B's decode steps with 64 requests, with and without overlap, with and without graphs. The
# device's times are CUDA events around each step. The traces are in `data/`, and say where they are from.
#
# **Predict:** a step without graphs (*eager* in the figure) is some 300 launches. Which of the four has the
# shortest steps? Does overlap help where there are no graphs?


# %%
def recorded_steps(folder, requests=64):
    names = {"plain, eager": "plain-eager", "overlap, eager": "overlap-eager"}
    names |= {"plain, graphs": "plain-graphs", "overlap, graphs": "overlap-graphs"}
    return {name: read_events(folder / f"stage7-steps-{requests}-{file}.json") for name, file in names.items()}


def step_ms(events):
    """Milliseconds from a step's start on the device to the next one's, the median."""
    starts = [event.ts for event in events if event.track == "device"]
    return statistics.median(b - a for a, b in pairwise(starts)) / 1e6


source = json.loads((DATA / "stage7-steps-64-overlap-graphs.json").read_text())["otherData"]
print(source["machine"], source["date"], source["versions"], "·", source["command"])
runs_recorded = recorded_steps(DATA)
apart_ms = {name: step_ms(events) for name, events in runs_recorded.items()}
print({name: round(ms, 2) for name, ms in apart_ms.items()}, "ms a step")
assert apart_ms["overlap, graphs"] < apart_ms["plain, graphs"] < apart_ms["plain, eager"] / 4
assert abs(apart_ms["overlap, eager"] / apart_ms["plain, eager"] - 1) < 0.35
viz.timeline(
    runs_recorded,
    count=5,
    title=f"A graph makes a step of {apart_ms['plain, eager']:.0f} ms one of {apart_ms['plain, graphs']:.1f}, "
    f"and overlap then one of {apart_ms['overlap, graphs']:.1f}",
)

# %% [markdown]
# Without graphs the host launches all the time: there is nothing left of it to overlap with, and the loop with overlap
# is no faster: in this recording it is a quarter slower. (Here every launch goes through Python and Triton's launcher,
# some 55 µs each.)
# (A bar of the device's is from a step's first kernel to its last: without graphs it mostly waits, see below.)
# With graphs a step is 2 ms of the device and as much of the host, and overlap is what puts them side by side. Bubbles
# remain even then: at 64 requests this model is so small that scheduling takes longer than computing.
#
# One step of one request, launch by launch and kernel by kernel, under torch's profiler, which slows the host down:
#
# **Predict:** how many launches are left with a graph?

# %%
profiled = {
    name: read_events(DATA / f"stage7-launches-1-{file}.json")
    for name, file in {"one by one": "eager", "as a graph": "graphs"}.items()
}
one_by_one, as_graph = map(viz.launched_step, profiled.values())
assert len(one_by_one.launches) == len(one_by_one.kernels) > 10 * len(as_graph.launches)
assert abs(one_by_one.busy / as_graph.busy - 1) < 0.25  # the work is the same
assert as_graph.lasts < one_by_one.lasts / 5
viz.launches(profiled)

# %% [markdown]
# 13 launches: the graph, the head, two for sampling, and copies of what the step reads. What the launches cost a step,
# then: the time in which kernels run is the profiler's, how long the step is on the device was measured without it.
#
# **Predict:** for which of these four does the device mostly compute?

# %%
tax = {}
for requests in (1, 64):
    for name, file in {"one by one": "eager", "as a graph": "graphs"}.items():
        busy = viz.launched_step(read_events(DATA / f"stage7-launches-{requests}-{file}.json")).busy
        plain = recorded_steps(DATA, requests)[f"plain, {file}"]
        whole = statistics.median(event.duration for event in plain if event.track == "device") / 1e9
        tax[f"{requests} request{'s' * (requests > 1)}, {name}"] = (busy, whole)
computes = {name: busy / whole for name, (busy, whole) in tax.items()}
assert all(share > 0.75 for name, share in computes.items() if "graph" in name)
assert all(share < 0.15 for name, share in computes.items() if "graph" not in name)
waits = [f"{100 * (1 - share):.0f}\u00a0%" for share in computes.values()]
viz.launch_tax(
    tax,
    title=f"One by one the device waits for launches {waits[0]} of a step of 1 request and {waits[2]} of one of 64, "
    f"in a graph {waits[1]} and {waits[3]}",
)

# %% [markdown]
# A kernel one by one is 55 to 64 µs of the host, where the call that launches it takes 7: the rest is Python's way to
# it. So even 64 requests wait.
#
# To record the same on your own GPU (half a minute; any CUDA GPU):

# %%
if torch.cuda.is_available():
    command = ["-m", "minisgl.benchmark", "record-trace", "steps", "--model", "qwen3-0.6b", "--out", folder.name]
    subprocess.run([sys.executable, *command], check=True, timeout=300)
    display(viz.timeline(recorded_steps(Path(folder.name)), count=5))
else:
    print("no CUDA here")

# %% [markdown]
# ## If you have a GPU
#
# The built-in model's decode step, kernel by kernel and as a graph. Without CUDA there is nothing to measure.

# %%
if torch.cuda.is_available():
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for largest in (0, 8):
        with LLM("smollm2-135m", cuda_graph_max_bs=largest, max_seq_len=512) as llm:
            llm.generate("warm up", SamplingParams(max_tokens=8))
            start = time.perf_counter()
            llm.generate("Once upon a time", params)
            print(f"cuda_graph_max_bs={largest}: {(time.perf_counter() - start) / 200 * 1e3:.2f} ms a step")
else:
    print("no CUDA here")

# %% [markdown]
# ## Your code serves
#
# Once an exercise is done, `--mine 7` puts your methods in the package's place. 7.4 and 7.5 wait for a GPU; their
# tests have replayed graphs of a recorder.

# %%
command = ["-m", "minisgl.stage7", "--mine", "7", "--max-tokens", "16", "--prompt", "The capital of France is"]
done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240)
print(done.stderr + done.stdout)

# %%
check("7")

# %% [markdown]
# ## Where it still loses
#
# - You are its only user, in its own process: stage 8.
# - A request that ends by EOS is computed once more for nothing; what arrives while a step is prepared waits for one
#   step more.
#
# The [chapter](../chapters/stage7_overlap/README.md) has the numbers, the other engines' names, and questions;
# [its side page](../chapters/stage7_overlap/kernels.md) has the kernels.
