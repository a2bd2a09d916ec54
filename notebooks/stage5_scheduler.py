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
# # Stage 5 · scheduler
#
# Until now a batch began together and ended together. Here a scheduler makes a new batch for every step: who has ended
# leaves, who waits joins, a long prompt comes in pieces, and when memory runs out somebody goes back to the queue. By
# the end its decisions are yours.
#
# Run the cells in order. Where it says **predict**, answer for yourself before you run the next cell. The text behind
# it is [the chapter](../chapters/stage5_scheduler/README.md). `minisgl start 5`, in a terminal, makes
# `chapters/stage5_scheduler/mine.py`, where you will write; until then the cells with `check` say that you have not
# begun.

# %%
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from minisgl import SamplingParams, viz
from minisgl.benchmark.models import CONFIGS
from minisgl.core.req import Req
from minisgl.core.trace import read_events
from minisgl.learn import check
from minisgl.models.config import ModelConfig
from minisgl.stage4.llm import LLM as Stage4
from minisgl.stage5.admission import EstimatedOutput, FullReservation
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.cost_model import H200, CostModel
from minisgl.stage5.decode import DecodeManager
from minisgl.stage5.llm import LLM
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage5.simulated_engine import TOKEN_IDS, SimulatedEngine, VirtualClock, VirtualTracer, token_ids

folder = tempfile.TemporaryDirectory()

# %% [markdown]
# ## What breaks today
#
# Eight requests for two rows, with answers of 2 and of 12 tokens in turn: once by stage 4, whose two requests begin
# together and end together, and once by stage 5.
#
# **Predict:** stage 4 prefills each prompt by itself, then decodes in pairs until the longer of the two has ended. How
# many steps is that for all eight? And how many when a row is filled again as soon as it is free?

# %%
prompts = [f"{name} is a planet that" for name in "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()]
params = [SamplingParams(max_tokens=12 if uid % 2 else 2, ignore_eos=True) for uid in range(8)]
traces, answers = {}, {}
for name, llm_class in (("stage 4", Stage4), ("stage 5", LLM)):
    path = Path(folder.name) / f"{name}.json"
    with llm_class("smollm2-135m", dtype="float32", max_running_requests=2, max_seq_len=256, trace=str(path)) as llm:
        answers[name] = [answer.token_ids for answer in llm.generate(prompts, params)]
    traces[name] = read_events(path)

steps = {name: len(viz.steps(events)) for name, events in traces.items()}
print("steps:", steps)
assert answers["stage 4"] == answers["stage 5"]
assert steps["stage 4"] == 8 + 4 * 11
assert steps["stage 5"] < 0.7 * steps["stage 4"]
viz.gantt(traces["stage 4"], title=f"Stage 4: {steps['stage 4']} steps; each pair ends when its longer answer does")

# %%
viz.gantt(traces["stage 5"], title=f"Stage 5: {steps['stage 5']} steps; a row that is free has a new request at once")

# %% [markdown]
# Same answers, token for token, in fewer steps: no row is empty while somebody waits. What each step computed:

# %%
composition = viz.steps(traces["stage 5"])
assert any(step.decode and step.extend for step in composition)
assert sum(step.decode for step in composition) == 4 * (1 + 11)
viz.batch_composition(traces["stage 5"])

# %% [markdown]
# A bar with both colours is a **mixed batch**: one request decodes, and in the same forward another's prompt is
# prefilled. Its weights are read once for both.

# %% [markdown]
# ## The loop, by hand
#
# A step is three calls: `schedule` (who, and all that the engine needs), `forward`, `commit` (the sampled values). The
# next cell writes this loop once more, with one thing added: a request may arrive before a given step. It serves a real
# engine or a simulated one, which computes nothing and moves a clock by what a cost model of an H200 says. There the
# scheduler is the same, times do not depend on your machine, and they are the same for everybody.


# %%
def serve(scheduler, requests, each=lambda scheduler: None):
    """requests: uid -> (step before which it arrives, prompt ids, SamplingParams). Returns tokens and their times."""
    tokens, times = {uid: [] for uid in requests}, {uid: [] for uid in requests}
    waiting, step = dict(requests), 0
    while waiting or scheduler.has_work:
        for uid in [uid for uid, (arrival, _, _) in waiting.items() if arrival <= step]:
            scheduler.add(uid, *waiting.pop(uid)[1:])
        forward_input = scheduler.schedule()
        with scheduler.tracer.span("forward", "engine", step=step + 1):
            output = scheduler.forward(forward_input)
        for result in scheduler.commit(forward_input, output):
            tokens[result.uid].append(result.token_id)
            times[result.uid].append(scheduler.tracer.now() / 1e9)
        step += 1
        each(scheduler)
    scheduler.tracer.close()
    return tokens, times


def simulated(name, lengths, **options):
    """A scheduler on the simulated engine, for Llama-3.1-8B. lengths: tokens of each request at its own end."""
    tracer = VirtualTracer(Path(folder.name) / f"{name}.json", VirtualClock())
    config = SchedulerConfig(**options)
    cost = CostModel(ModelConfig.from_dict(CONFIGS["llama-3.1-8b"]), H200)
    engine = SimulatedEngine(config, cost, 20_000, tracer, np.array(lengths))
    return Scheduler(config, engine, frozenset({TOKEN_IDS}), tracer)


def text(uid, length):
    """A prompt that shares nothing with another's."""
    return token_ids(2 * uid, np.arange(length)).tolist()


def trace_of(name):
    return read_events(Path(folder.name) / f"{name}.json")


# %% [markdown]
# Pages of 16 tokens, 8 of them, 32 tokens a step. Three requests, each of which may ask for 60 more tokens; request 0
# will end after 2. This is the example of the chapter.
#
# **Predict:** all three are there before the first step. Which of them run in it, if each is let in only when the pages
# for *all* it asks for are there?

# %%
scheduler = simulated("by hand", [20 + 2, 60 + 60, 20 + 60], page_size=16, num_pages=8, max_prefill_length=32)
asked = SamplingParams(max_tokens=60)
rows = []


def note(scheduler):
    running = {uid: req.device_len for uid, req in scheduler.decode.running.items()}
    rows.append((running, list(scheduler.prefill.pending), scheduler.cache.available_pages, scheduler.retractions))


serve(scheduler, {0: (0, text(0, 20), asked), 1: (0, text(1, 60), asked), 2: (0, text(2, 20), asked)}, each=note)
for step in (1, 2, 3, 4, 5, 24, 25, 63, 65, 104):
    running, waiting, pages, retracted = rows[step - 1]
    print(f"after step {step:3}: runs {running}, waits {waiting}, {pages} pages available, {retracted} retracted")
assert rows[0][:2] == ({0: 21}, [1, 2])
assert rows[23][0] == {1: 81, 2: 40}
assert (rows[24][1], rows[24][3]) == ([2], 1)
assert len(rows) == 104

# %% [markdown]
# Request 0 alone: it is promised 5 pages, request 1 would be promised 8, and the pool has 8. When 0 has ended after two
# tokens, short answers are expected, and both others are let in (steps 3 to 5; the long prompt comes in two chunks).
# They were not short. At step 25 request 1 needs a page and there is none: request 2, which came last, goes back, and
# is computed again after step 63.

# %%
events = trace_of("by hand")
assert len(viz.steps(events)) == 104
viz.gantt(events, title="Request 2 is retracted for 39 steps, so that request 1 gets to its end")

# %% [markdown]
# ## Exercise 5.1 · find room for a request
#
# Two ways to promise pages. `FullReservation` promises all that a request may ever ask for, `EstimatedOutput` what
# answers had on average of late.
#
# **Predict:** a prompt of 100 tokens asks for up to 900 more. How many pages of 16 are promised by each, when answers
# of late had 50 tokens? And to the same request when it has made 80 tokens and is still going?

# %%
full, estimated = FullReservation(16), EstimatedOutput(16)
estimated.note_finished(50)
promised = {
    now: [admission.pages(0, 100, now, 1000) for admission in (full, estimated)]
    for now in (100, 180)  # the tokens it has
}
print("tokens -> pages promised in all (reserve, estimate):", promised)
assert promised == {100: [63, 10], 180: [63, 13]}

# %% [markdown]
# The first never runs out of pages, and keeps 53 of them idle if this answer has 50 tokens too. The second lets six
# such requests in where the first lets one in. Your part is to find room: match, lock, count, and undo the lock if
# there is too little.

# %%
check("5.1")

# %% [markdown]
# ## Exercise 5.2 · cut to the budget
#
# Eight streams, and after 40 steps a prompt of 16,000 tokens, on the simulated H200. Three schedulers: the whole prompt
# in one step; in chunks of 1,024 with *prefill first*, as mini-sglang has it; in chunks with *mixed* batches.
#
# **Predict:** how long do the streams stand still in each? Does cutting help by itself?

# %%
SETTINGS = {
    "whole": ("mixed", 32_768),
    "prefill-first, 1,024": ("prefill-first", 1024),
    "mixed, 1,024": ("mixed", 1024),
    "mixed, 512": ("mixed", 512),
    "mixed, 128": ("mixed", 128),
}
streams = {uid: (0, text(uid, 200), SamplingParams(max_tokens=120)) for uid in range(8)}
long_prompt = {8: (40, text(8, 16_000), SamplingParams(max_tokens=50))}
of_a_stream, stalls, first_tokens = {}, {}, {}
for name, (policy, budget) in SETTINGS.items():
    scheduler = simulated(name, [320] * 8 + [16_050], schedule_policy=policy, max_prefill_length=budget)
    _, times = serve(scheduler, streams | long_prompt)
    arrived = next(span.start for span in viz.request_spans(trace_of(name)) if span.uid == 8)
    of_a_stream[name], first_tokens[name] = times[0], times[8][0] - arrived
    stalls[name] = max(later - earlier for earlier, later in pairwise(times[0]))
    print(
        f"{name:22} longest stall {stalls[name] * 1e3:5.0f} ms · long prompt's first token {first_tokens[name]:.2f} s"
    )
assert stalls["prefill-first, 1,024"] > stalls["whole"] > 10 * stalls["mixed, 1,024"]
assert stalls["mixed, 512"] < stalls["mixed, 1,024"]
assert first_tokens["mixed, 128"] > 3 * first_tokens["mixed, 1,024"]
shown = ("whole", "prefill-first, 1,024", "mixed, 1,024", "mixed, 128")
viz.token_times(
    {name: of_a_stream[name] for name in shown},
    title=f"A prompt of 16,000 tokens stops a stream for {stalls['whole'] * 1e3:.0f} ms; in mixed batches of 1,024 "
    f"it never waits longer than {stalls['mixed, 1,024'] * 1e3:.0f} ms",
)

# %% [markdown]
# One stream, while the long prompt is served; where a line is flat, nothing comes. Cutting alone does nothing as long
# as prompts go first: the next chunk is always first. Only in mixed batches do streams get on between chunks. And a
# chunk has its price: every step reads all weights, and one with 128 tokens takes no less time than one with 512. So
# with chunks of 128 the prompt's first token takes four times as long, and the streams are slow for all of that time.

# %% [markdown]
# The same run, step by step. **Predict:** how many prompt tokens has a step in which all eight streams decode?

# %%
mixed = viz.steps(trace_of("mixed, 1,024"))
chunks = [step.extend for step in mixed if step.decode == 8 and step.extend]
print("prompt tokens beside 8 streams:", chunks)
assert max(step.tokens for step in mixed) == 1024
assert chunks[:-1] == [1024 - 8] * 15
assert sum(chunks) == 16_000
viz.batch_composition(
    trace_of("mixed, 1,024"),
    title="No step has more than 1,024 tokens: 8 of the streams, and what is left, of a prompt",
)

# %%
check("5.2")

# %% [markdown]
# ## Exercise 5.3 · who decodes in this step
#
# Four requests run; pages have 16 tokens. 0 and 2 have just filled a page, 1 and 3 have room. Request 3 was retracted
# while a step of it is in flight.
#
# **Predict:** who is in the next batch when 4 pages are there, when 1 is, and when none is?

# %%
manager = DecodeManager(FullReservation(16))
for uid, length in ((2, 33), (0, 17), (3, 20), (1, 25)):
    req = Req(uid, torch.ones(length, dtype=torch.int32), SamplingParams(max_tokens=50), uid, cached_len=length - 1)
    req.retracted = uid == 3
    manager.add([req])
chosen = {pages: [req.uid for req in manager.schedule(pages)] for pages in (4, 1, 0)}
print("pages -> uids:", chosen)
assert chosen == {4: [0, 1, 2], 1: [0, 1], 0: [1]}

# %%
check("5.3")

# %% [markdown]
# ## Exercise 5.4 · commit what was sampled
#
# (The text of this exercise and the next is with [the order of a step](../chapters/stage5_scheduler/one-step.md).)
#
# Where does the next step find the token that this one sampled? On the device, in the **token pool**: a row for each
# request, parallel to its row of slots. `forward` reads its ids from there and writes to it what was sampled; `commit`
# learns the values later. Here, the real model, a prompt of 5 tokens and a budget of 2 a step.
#
# **Predict:** something is sampled in each step, after a chunk too. Where must that go?

# %%
settings = {"dtype": "float32", "max_seq_len": 256, "max_running_requests": 4, "max_prefill_length": 2}
with LLM("smollm2-135m", num_pages=32, **settings) as llm:
    scheduler = llm.scheduler
    ids = llm.tokenizer.encode("The capital of France is")
    scheduler.add(0, ids, SamplingParams(max_tokens=3))
    written, kinds = [], []
    while scheduler.has_work:
        forward_input = scheduler.schedule()
        (req,) = forward_input.batch.reqs
        output = scheduler.forward(forward_input)
        pool_row = scheduler.tables.token_pool[0, : len(ids) + 3].tolist()
        (result,) = scheduler.commit(forward_input, output) or [None]
        written.append(tuple(indices.item() for indices in forward_input.write_tuple))
        kinds.append(type(req).__name__)
        print(f"{kinds[-1]:10} writes to (row, column) {written[-1]}; row 0: {pool_row}; {result and result.token_id}")
    assert kinds[:2] == ["ChunkedReq"] * 2
    assert written == [(4, 0), (4, 0), (0, 5), (0, 6), (0, 7)]
    assert req.input_ids.tolist() == pool_row
    print(llm.tokenizer.decode(req.input_ids.tolist()))

# %% [markdown]
# Row 4 is the dummy's: what was sampled after a chunk goes there, and nobody reads it. In row 0 the answer grows behind
# the prompt, on the device, before `commit` is called. So the next `schedule` needs no value of this step. Your part is
# what does: append, say whether it was the last, give back.

# %%
check("5.4")

# %% [markdown]
# ## Exercise 5.5 · make room by retraction
#
# One short answer first, so that short answers are expected. Then three prompts whose answers have 40 tokens, in a pool
# of 40 pages of 2 tokens, and in one of 200.
#
# **Predict:** all three are let in. Who goes back, and are the answers the same?

# %%
QUESTIONS = ["What is 2+2?", "The three primary colours are", "Once upon a time"]
params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=t, seed=1) for t in (0.0, 0.0, 0.8)]
found, retractions = {}, {}
settings = {"dtype": "float32", "max_seq_len": 256, "page_size": 2, "cache": "naive"}
for num_pages in (200, 40):
    path = Path(folder.name) / f"{num_pages} pages.json"
    with LLM("smollm2-135m", num_pages=num_pages, trace=str(path), **settings) as llm:
        llm.generate("a", SamplingParams(max_tokens=1))
        found[num_pages] = [answer.token_ids for answer in llm.generate(QUESTIONS, params)]
        retractions[num_pages] = llm.stats()["retractions"]
    traces[num_pages] = read_events(path)
print("retractions:", retractions)
assert found[200] == found[40]
assert retractions[200] == 0 < retractions[40]
viz.gantt(
    traces[40], title=f"{retractions[40]} retractions in a pool of 40 pages: who came last goes, and is computed again"
)

# %%
back = [span.uid for span in viz.request_spans(traces[40]) if span.state == "retracted"]
assert min(back) > min(span.uid for span in viz.request_spans(traces[40]) if span.state == "decode")
viz.page_usage(traces[40])

# %% [markdown]
# The answers are the same, the sampled one too: its random numbers depend on its seed and on the position, not on the
# batch. What was lost is time: a retracted request computes all its tokens again, as a prompt. (With `--cache radix`,
# the default, it finds what nobody has evicted meanwhile; `naive` shows the worst case.)

# %%
check("5.5")

# %% [markdown]
# ## What estimates are worth
#
# 40 requests at once on the simulated H200, each asks for up to 1,000 tokens and has an answer of 100. 600 pages.
#
# **Predict:** which admission is faster, and which retracts?

# %%
outcome = {}
for admission in ("reserve", "estimate"):
    name = f"admission {admission}"
    scheduler = simulated(name, [300 + 100] * 40, admission=admission, num_pages=600, max_prefill_length=2048)
    serve(scheduler, {uid: (0, text(uid, 300), SamplingParams(max_tokens=1000)) for uid in range(40)})
    outcome[admission] = (scheduler.tracer.now() / 1e9, scheduler.retractions)
    print(f"{admission:9} all done after {outcome[admission][0]:.2f} s, {outcome[admission][1]} retractions")
assert outcome["estimate"][0] < 0.8 * outcome["reserve"][0]
assert outcome["reserve"][1] == 0
viz.gantt(
    trace_of("admission estimate"),
    title="Expecting short answers: 7 at a time until the first have ended, then as many as fit",
)

# %% [markdown]
# Neither retracts: all answers have the length that was expected. It is answers that turn out longer than those before
# them, as in 5.5, that cost a retraction.

# %% [markdown]
# ## Your code serves
#
# Once an exercise is done, `--mine 5` puts your methods in the package's place. A small budget, so that prompts are
# cut.

# %%
command = ["-m", "minisgl.stage5", "--mine", "5", "--max-prefill-length", "4", "--max-tokens", "16"]
for prompt in ("The capital of France is", "The capital of Italy is", "The colour of the sky is"):
    command += ["--prompt", prompt]
done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240)
print(done.stderr + done.stdout)

# %%
check("5")

# %% [markdown]
# ## Where it still loses
#
# - The model has to fit on one device: stage 6.
# - While Python schedules and commits, the device waits: stage 7.
#
# The [chapter](../chapters/stage5_scheduler/README.md) has the numbers, the other engines' names, and questions.
