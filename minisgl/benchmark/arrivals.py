"""Requests to simulate: lengths, who shares which text with whom, and when each arrives. Knows nothing of serving.

A workload is a function of a `Load`; the same load always gives the same requests. Text is described, not made: a
prompt is a row of segments of numbered streams, and two prompts share a prefix exactly if they begin with the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from minisgl.stage5.simulated_engine import TOKEN_IDS, answer_stream, in_vocabulary, token_ids

TURNS = 4  # of a chat
THINK_S = 10.0  # mean seconds between an answer and the next question
GROUP = 32  # requests that share a prefix
SHARED = 0.75  # of a prompt's mean length is shared in a group
LONG_EVERY, LONG_TIMES = 64, 16  # one prompt in 64 is 16 times as long as the others
BURST_S, BURST_TIMES = 2.0, 4  # seconds of a burst, in which four times the mean rate arrives; then a pause


class Segment(NamedTuple):
    """Tokens of a stream, from where the segment before it ends up to position `end` of the prompt."""

    stream: int
    end: int


@dataclass(frozen=True)
class Arrival:
    """One request. It arrives `time_ns` after the start, or after request `after` has ended."""

    uid: int
    segments: tuple[Segment, ...]
    output_len: int
    time_ns: int
    after: int | None = None
    max_tokens: int | None = None  # it asks for; None: just as many as its answer has

    @property
    def max_len(self) -> int:
        """Tokens of its prompt, and of the longest answer that it asks for."""
        return self.prompt_len + (self.max_tokens or self.output_len)

    @property
    def prompt_len(self) -> int:
        return self.segments[-1].end

    def prompt_ids(self, vocab_size: int = TOKEN_IDS) -> list[int]:
        starts = [0, *(segment.end for segment in self.segments)]
        streams = np.repeat([s.stream for s in self.segments], np.diff(starts))
        return in_vocabulary(token_ids(streams, np.arange(self.prompt_len)), vocab_size).tolist()


@dataclass(frozen=True)
class Load:
    """rate: requests a second on average; None: all arrive at once. Lengths in tokens, means."""

    requests: int
    rate: float | None
    prompt_len: int = 512
    output_len: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("requests", self.requests),
            ("prompt-len", self.prompt_len),
            ("output-len", self.output_len),
        ):
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, not {value}")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise ValueError(f"--rate must be a number above 0, not {self.rate}: leave it out for all at once")

    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


def uniform(load: Load) -> list[Arrival]:
    """Lengths from a fifth of the mean to nine fifths of it; nothing is shared."""
    rng = load.random()
    return _alone(_uniform(rng, load.prompt_len, load.requests), _uniform(rng, load.output_len, load.requests),
                  poisson(rng, load.requests, load.rate))  # fmt: skip


def lognormal(load: Load) -> list[Arrival]:
    """Many short ones and a few long ones: sigma 1, at most 16 times the mean."""
    rng = load.random()

    def lengths(mean: int) -> np.ndarray:
        drawn = rng.lognormal(math.log(mean) - 0.5, 1.0, load.requests)
        return np.clip(np.rint(drawn), 1, 16 * mean).astype(np.int64)

    prompts, outputs = lengths(load.prompt_len), lengths(load.output_len)
    return _alone(prompts, outputs, poisson(rng, load.requests, load.rate))


def shared_prefix(load: Load) -> list[Arrival]:
    """Groups of 32 requests, mixed in time, whose first three quarters are the group's system prompt."""
    rng = load.random()
    groups = -(-load.requests // GROUP)
    prefixes = _uniform(rng, max(1, round(SHARED * load.prompt_len)), groups)
    tails = _uniform(rng, max(1, load.prompt_len - round(SHARED * load.prompt_len)), load.requests)
    outputs, times = _uniform(rng, load.output_len, load.requests), poisson(rng, load.requests, load.rate)
    return [
        Arrival(uid, (Segment(2 * (load.requests + group), prefix), Segment(2 * uid, prefix + tail)), output, time)
        for uid, (group, tail, output, time) in enumerate(
            zip(rng.integers(groups, size=load.requests).tolist(), tails.tolist(), outputs.tolist(), times, strict=True)
        )
        for prefix in [int(prefixes[group])]
    ]


def multi_turn(load: Load) -> list[Arrival]:
    """Chats of four turns. A turn's prompt is the one before it, its answer, and a new message; it comes a while after
    that answer. Chats begin at a quarter of the rate, so that requests come at the whole of it."""
    rng = load.random()
    messages, outputs = _uniform(rng, load.prompt_len, load.requests), _uniform(rng, load.output_len, load.requests)
    starts = poisson(rng, -(-load.requests // TURNS), load.rate and load.rate / TURNS)
    thinking = (rng.exponential(THINK_S, load.requests) * 1e9).astype(np.int64)
    arrivals: list[Arrival] = []
    for uid in range(load.requests):
        chat, turn = divmod(uid, TURNS)
        before: tuple[Segment, ...] = ()
        if turn:
            last = arrivals[-1]
            before = (*last.segments, Segment(answer_stream(last.uid), last.prompt_len + last.output_len))
        end = (before[-1].end if before else 0) + int(messages[uid])
        time = int(thinking[uid]) if turn else starts[chat]
        segments = (*before, Segment(2 * uid, end))
        arrivals.append(Arrival(uid, segments, int(outputs[uid]), time, uid - 1 if turn else None))
    return arrivals


def long_prompt(load: Load) -> list[Arrival]:
    """Streams, and every now and then a prompt 16 times as long that must not stop them."""
    rng = load.random()
    prompts, outputs = _uniform(rng, load.prompt_len, load.requests), _uniform(rng, load.output_len, load.requests)
    prompts[LONG_EVERY // 2 :: LONG_EVERY] = LONG_TIMES * load.prompt_len
    return _alone(prompts, outputs, poisson(rng, load.requests, load.rate))


def bursts(load: Load) -> list[Arrival]:
    """Poisson arrivals, switched on and off: bursts of two seconds on average at four times the rate, and pauses."""
    if load.rate is None:
        raise ValueError("bursts need --rate: the mean of requests a second")
    rng = load.random()
    busy = np.array(poisson(rng, load.requests, load.rate * BURST_TIMES), dtype=np.int64)  # on a clock without pauses
    lengths = rng.exponential(BURST_S, int(busy[-1] / 1e9 / BURST_S * 2) + 16).cumsum() * 1e9
    pauses = (rng.exponential(BURST_S * (BURST_TIMES - 1), len(lengths)).cumsum() * 1e9).astype(np.int64)
    number = np.searchsorted(lengths, busy)  # of the burst that each request is in
    times = busy + np.where(number > 0, pauses[np.minimum(number, len(pauses)) - 1], 0)
    prompts, outputs = _uniform(rng, load.prompt_len, load.requests), _uniform(rng, load.output_len, load.requests)
    return _alone(prompts, outputs, times.tolist())


WORKLOADS: dict[str, Callable[[Load], list[Arrival]]] = {
    "uniform": uniform,
    "lognormal": lognormal,
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "long-prompt": long_prompt,
    "bursts": bursts,
}


def asking_for(max_tokens: int, arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests, whose answers end before max_tokens as most answers do. Raises ValueError if one does not."""
    longest = max(arrival.output_len for arrival in arrivals)
    if longest > max_tokens:
        raise ValueError(f"--max-tokens {max_tokens} would cut answers: the longest of this workload has {longest}")
    return [replace(arrival, max_tokens=max_tokens) for arrival in arrivals]


def poisson(rng: np.random.Generator, count: int, rate: float | None) -> list[int]:
    """Nanoseconds at which `count` independent requests arrive, `rate` a second; all 0 without a rate."""
    if rate is None:
        return [0] * count
    return (rng.exponential(1e9 / rate, count).cumsum()).astype(np.int64).tolist()


def _uniform(rng: np.random.Generator, mean: int, count: int) -> np.ndarray:
    return rng.integers(max(1, round(0.2 * mean)), round(1.8 * mean), count, endpoint=True)


def _alone(prompts: np.ndarray, outputs: np.ndarray, times: list[int]) -> list[Arrival]:
    """Requests that share nothing."""
    rows = zip(prompts.tolist(), outputs.tolist(), times, strict=True)
    return [Arrival(uid, (Segment(2 * uid, prompt),), output, time) for uid, (prompt, output, time) in enumerate(rows)]
