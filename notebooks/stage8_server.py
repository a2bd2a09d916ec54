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
# # Stage 8 · server
#
# The engine gets its users: processes that talk by messages, and HTTP. By the end the way of every message, of every
# piece of text and of every abort is yours.
#
# Run the cells in order. Where it says **predict**, answer for yourself before you run the next cell. The text behind
# it is [the chapter](../chapters/stage8_server/README.md). `minisgl start 8`, in a terminal, makes
# `chapters/stage8_server/mine.py`, where you will write; until then the cells with `check` say that you have not begun.

# %%
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minisgl import SamplingParams, viz
from minisgl.core.detokenizer import IncrementalDetokenizer
from minisgl.core.tokenizer import Tokenizer
from minisgl.core.trace import read_events
from minisgl.learn import check
from minisgl.models.resolve import resolve_model
from minisgl.stage8.codec import MalformedMessage, MessageDecoder, encode
from minisgl.stage8.detokenizer import DetokenizerRole
from minisgl.stage8.messages import TO_SCHEDULER, Abort, Begin, Generate, Step, StopMatched
from minisgl.stage8.stop_strings import StopStrings

folder = tempfile.TemporaryDirectory()
trace, log = Path(folder.name) / "trace.json", Path(folder.name) / "log"

# %% [markdown]
# ## A server, and a request
#
# One command starts it, here as a process beside this notebook, on any free port. It says when it is ready.


# %%
@contextmanager
def server(*flags: str) -> Iterator[int]:
    """Its port; or 0 if it did not start. It ends with the block."""
    command = [sys.executable, "-m", "minisgl.stage8", "--port", "0", "--threads", "1", "--num-pages", "512", *flags]
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors) as process:
        while process.poll() is None and "minisgl ready" not in log.read_text():
            time.sleep(0.05)
        ready = re.search(r"minisgl ready: http://127.0.0.1:(\d+)", log.read_text())
        try:
            yield int(ready[1]) if ready else 0
        finally:
            process.send_signal(signal.SIGTERM)


def post(port: int, **body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({"temperature": 0, "max_tokens": 16, **body}))
    return connection, connection.getresponse()


def whole(port: int, **body: Any) -> dict[str, Any]:
    connection, response = post(port, **body)
    answer = json.loads(response.read())
    connection.close()
    return answer


def stream(port: int, leave_after: int | None = None, **body: Any) -> list[str]:
    """The texts of its events; leaves after so many of them."""
    connection, response = post(port, stream=True, **body)
    pieces: list[str] = []
    for line in response:
        if line.startswith(b"data: {"):
            pieces.append(json.loads(line[6:])["choices"][0]["text"])
            if len(pieces) == leave_after:
                break
    connection.close()
    return pieces


def when_idle(port: int) -> dict[str, int]:
    """The scheduler's counters, once nothing is open or held."""
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/server_info")
        counters = json.loads(connection.getresponse().read())
        connection.close()
        if counters["requests_open"] == counters["rows_in_use"] == 0:
            break
        time.sleep(0.1)
    return counters


# %% [markdown]
# Everything that is measured below happens here: an answer, a stream, one that a stop string ends, one that is wrong,
# six clients one after another and then six at once, and one that leaves in the midst of its answer.
#
# **Predict:** with six at once, which gets longer: the time to the first token, or the time between two?

# %%
QUESTIONS = [
    f"The capital of {country} is" for country in ("France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Ghana")
]
with server("--trace", str(trace)) as port:
    answer = whole(port, prompt=QUESTIONS[0])
    pieces = stream(port, prompt=QUESTIONS[0])
    stopped = whole(port, prompt=QUESTIONS[0], stop=["\n"])
    refused = whole(port, prompt=QUESTIONS[0], max_tokens=-3)
    for question in QUESTIONS[1:]:
        stream(port, prompt=question, ignore_eos=True)
    with ThreadPoolExecutor(6) as clients:
        list(clients.map(lambda question: stream(port, prompt="Now: " + question, ignore_eos=True), QUESTIONS[1:]))
    left = stream(port, leave_after=4, prompt="Once upon a time", max_tokens=200, ignore_eos=True)
    at_the_end = when_idle(port)
events = read_events(trace)
print(re.search("minisgl ready.*", log.read_text())[0])
print(json.dumps(answer["choices"][0]), answer["usage"]["completion_tokens"], "tokens")
assert "".join(pieces) == answer["choices"][0]["text"], "what is streamed is what is given whole"

# %% [markdown]
# ## One request's journey
#
# Each process wrote down what it sent, for which request, and when. This is the first one.

# %%
journeys = Counter(event.name for event in events if event.track == "messages" and event.uid == 0)
print(dict(journeys))
assert journeys["Tokenize"] == journeys["Generate"] == 1
assert journeys["Step"] == journeys["Replies"] == answer["usage"]["completion_tokens"]
viz.journey(events, uid=0)

# %% [markdown]
# Up to the scheduler it is a few milliseconds; then one `Step` a token, and a `Replies` for each. The bar is the time
# that the scheduler spends on it. Text and HTTP happen beside the steps, in other processes.
#
# ## Exercise 8.1 · refuse malformed messages
#
# A message is a struct with typed fields. On the wire it is a map with a tag.
#
# **Predict:** what must a process do with bytes that are no message?

# %%
print(encode(Abort(1)))
decoder = MessageDecoder(TO_SCHEDULER)
for data in (encode(Abort(1)), encode(Abort(1))[:-1], b"noise", encode(Abort(1)).replace(b"\x01", b"\xa3one")):
    try:
        print(decoder.decode(data))
    except MalformedMessage as error:
        print("malformed:", error)
assert len(decoder.decode_all([encode(Abort(1)), b"noise", encode(StopMatched(2))])) == 2
assert decoder.malformed == 1

# %% [markdown]
# It counts them and goes on. The exercise is this decoder.

# %%
check("8.1")

# %% [markdown]
# ## Exercise 8.2 · text from tokens as they come
#
# A token is not a piece of text. ([The page](../chapters/stage8_server/text.md) of this exercise and the next.)
#
# **Predict:** how many tokens has 🍕, and what is the text of its first one?

# %%
tokenizer = Tokenizer.from_folder(resolve_model("smollm2-135m"))
ids = tokenizer.encode("Eat 🍕 now", add_special_tokens=False)
print("each by itself:", [tokenizer.decode([token_id]) for token_id in ids])
text = IncrementalDetokenizer(tokenizer)
shown = [text.add(token_id) for token_id in ids]
print("as they come:  ", [*shown, text.finish()])
assert "".join(shown) == "Eat 🍕 now"
assert "\ufffd" not in "".join(shown)

# %%
check("8.2")

# %% [markdown]
# ## Exercise 8.3 · hold back a possible stop string
#
# The text comes in pieces, and nothing of the stop string may be seen.
#
# **Predict:** the stop string is `END`. What is shown after each of these pieces?

# %%
stop = StopStrings(["END"])
for piece in (" the", " E", "N", "d", " E", "ND!"):
    before = stop.end(piece)
    if before is None:
        print(f"{piece!r:8} shows {stop.take(piece)!r}")
    else:
        print(f"{piece!r:8} shows {before!r}, and ends the answer")
assert before == ""
print(stopped["choices"][0])
assert stopped["choices"][0]["finish_reason"] == "stop"
assert answer["choices"][0]["text"].startswith(stopped["choices"][0]["text"] + "\n")

# %%
check("8.3")

# %% [markdown]
# The detokenizer's process does both, for all requests of a step at once. Here are the chapter's two, by hand: request
# 0 has a stop string, request 1 is a pizza whose client leaves.
#
# **Predict:** how many replies does request 0 get that say it has ended?

# %%
params = SamplingParams(max_tokens=9)
role = DetokenizerRole(tokenizer)
begin = Begin.of(Generate.of(0, [1], params, ["END"]))
assert begin is not None
pizza = tokenizer.encode("🍕", add_special_tokens=False)
letters = [tokenizer.encode(word, add_special_tokens=False)[0] for word in (" the", " E", "N", "D")]
steps = [Step([0, 1], [a, b], [None, None], [0, 0], [1, 1]) for a, b in zip(letters, pizza, strict=False)]
steps += [Step([0], [letters[3]], [None], [0], [1]), Step([1, 0], [None, None], ["abort", "abort"], [0, 0], [1, 1])]
terminal = Counter[int]()
for message in (begin, *steps):
    for result in role.handle([message]):
        if isinstance(result, StopMatched):
            print("StopMatched", result.uid)
            continue
        for reply in result.replies:
            print("Reply", reply.uid, repr(reply.text), reply.finish_reason or "")
            terminal[reply.uid] += reply.is_terminal
assert terminal == {0: 1, 1: 1}
assert role.num_open == 0

# %% [markdown]
# One each. The scheduler's own end of request 0 (it was told to stop) makes no second one.
#
# ## Exercise 8.4 · every reply to its own request
#
# All replies arrive at one socket of the API, in one message a step, whosever they are. It hands each to the call that
# waits for it.

# %%
sent = [event.uid for event in events if event.name == "Tokenize"]
groups = {"one at a time": set(sent[3:9]), "six at once": set(sent[9:15])}
routed = Counter(event.uid for event in events if event.name == "Reply")
print({uid: routed[uid] for uid in sent})
assert all(routed[uid] == 16 for uids in groups.values() for uid in uids), "16 tokens each, and each its own"
viz.gantt(events)

# %% [markdown]
# Request 0 paid for what a first step sets up. 2 ended at a stop string, 3 to 8 came one by one, 9 to 14 together, and
# the last one left. The request that was wrong is not here: it was refused, in words, before it was one.

# %%
print(refused["error"])
assert refused["error"]["param"] == "max_tokens"

# %%
check("8.4")

# %% [markdown]
# ## Under load
#
# Six clients one after another, and the same six at once.

# %%
first, between = {}, {}
for name, uids in groups.items():
    first[name], between[name] = viz.latencies([event for event in events if event.uid in uids])
assert all(len(times) == 6 for times in first.values())
viz.distribution(first, quantity="time to first token")

# %%
viz.distribution(between, quantity="time between tokens")

# %% [markdown]
# A first token waits for the step that runs when its prompt comes, and for the other prompts in its own step. After
# that a step with six requests takes longer than a step with one, but nowhere near six times as long: the weights are
# read once for all. That is what a server lives on.
# (On a busy machine single values jump; that is why these are distributions and not means.)
#
# ## Exercise 8.5 · abort what nobody waits for
#
# The last client closed its connection after four pieces of an answer that was to have 200 tokens.
#
# **Predict:** how many `Abort` messages does that take, and how many tokens are computed for nobody?

# %%
uid = sent[15]
names = Counter(event.name for event in events if event.track == "messages" and event.uid == uid)
print(dict(names))
assert names["Abort"] == 2, "API to tokenizer, tokenizer to scheduler"
assert names["Step"] < 20
viz.journey(events, uid=uid)

# %% [markdown]
# Two messages, as it goes the way that the request went, behind it. A token or two were under way: their replies came
# late and found nobody. And nothing is left of it, or of anybody:

# %%
kept = {
    name: at_the_end[name] for name in ("requests_open", "rows_in_use", "pages_in_use", "pages_free", "pages_cached")
}
print(kept)
assert kept["rows_in_use"] == kept["pages_in_use"] == 0
assert kept["pages_free"] + kept["pages_cached"] == 512

# %%
check("8.5")

# %% [markdown]
# ## Your code serves
#
# Once an exercise is done, `--mine 8` puts your methods in the package's place, in every process. An answer that a stop
# string ends, and a client that leaves, need all five.

# %%
with server("--mine", "8") as port:
    if port:
        print(whole(port, prompt=QUESTIONS[0], stop=["\n"])["choices"][0])
        stream(port, leave_after=2, prompt="Once upon a time", max_tokens=200, ignore_eos=True)
        when_idle(port)
print(log.read_text())

# %%
check("8")

# %% [markdown]
# ## Where it still loses
#
# - One stream gets slower, not faster: its tokens pass three processes.
# - One process does all of HTTP. With no model behind it two cores end near 65,000 tokens/s, the client among them.
# - When a process dies, the server ends. Whoever runs it has to start it again.
#
# The [chapter](../chapters/stage8_server/README.md) has the numbers, the other engines' names, and questions;
# [its side page](../chapters/stage8_server/start-up.md) goes from the command line to the line that says "ready".
