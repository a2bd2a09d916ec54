"""Arrivals served by the real scheduler and the real loops of stage 7 on a virtual clock. Knows no percentiles."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from minisgl.benchmark.arrivals import Arrival
from minisgl.core.batch import ForwardInput, ForwardOutput
from minisgl.core.llm import Request
from minisgl.core.outputs import TokenOutput
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer, merge
from minisgl.models.config import ModelConfig
from minisgl.stage3.engine import Engine
from minisgl.stage5.cost_model import CostModel, Device
from minisgl.stage5.policies import CreatePolicy, create_policy
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage5.simulated_engine import TOKEN_IDS, SimulatedEngine, Step, VirtualClock, VirtualTracer
from minisgl.stage6.messages import AddRequests, Order
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.llm import LLM, Steps
from minisgl.stage7.streams import Forward

NEVER = -1  # a time that has not come


class ArrivalInbox:
    """A stage 6 `Inbox`: what has arrived by now. When there is nothing else to do, it is time for the next."""

    def __init__(self, arrivals: Sequence[Arrival], clock: VirtualClock, vocab_size: int) -> None:
        self.clock, self.vocab_size = clock, vocab_size
        self.arrived: dict[int, int] = {}  # uid -> when
        self._waiting: list[tuple[int, int, Arrival]] = []
        self._after: dict[int, list[Arrival]] = {}
        for arrival in arrivals:
            if arrival.after is None:
                self._expect(arrival, arrival.time_ns)
            else:
                self._after.setdefault(arrival.after, []).append(arrival)

    def receive(self, blocking: bool) -> list[Order] | None:
        if blocking:
            if not self._waiting:
                return None
            self.clock.wait_until(self._waiting[0][0])
        requests: list[Request] = []
        while self._waiting and self._waiting[0][0] <= self.clock.now:
            time, uid, arrival = heapq.heappop(self._waiting)
            self.arrived[uid] = time
            params = SamplingParams(max_tokens=arrival.max_tokens or arrival.output_len)
            requests.append(Request(uid, arrival.prompt_ids(self.vocab_size), params))
        return [AddRequests(requests)] if requests else []

    def ended(self, uid: int) -> None:
        """Whoever waits for the end of this request comes some time after it."""
        for arrival in self._after.pop(uid, []):
            self._expect(arrival, self.clock.now + arrival.time_ns)

    def _expect(self, arrival: Arrival, time: int) -> None:
        heapq.heappush(self._waiting, (time, arrival.uid, arrival))


class SimulatedStream:
    """A stage 7 `EngineStream`: what runs on it has a time of its own, and the host's does not pass meanwhile."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._free_at = clock, 0

    def submit(self, forward: Forward, forward_input: ForwardInput) -> SimulatedTicket:
        host = self._clock.now
        self._clock.wait_until(self._free_at)
        output = forward(forward_input)
        self._free_at, self._clock.now = self._clock.now, host
        return SimulatedTicket(output)

    def close(self) -> None:
        """Nothing runs beside the caller."""


class SimulatedTicket(NamedTuple):
    output: ForwardOutput

    def result(self) -> ForwardOutput:
        return self.output


class Result(NamedTuple):
    """What happened. Times in nanoseconds; arrays by position in `arrivals`, NEVER for what was refused."""

    arrivals: list[Arrival]
    arrived: np.ndarray
    first: np.ndarray  # token
    last: np.ndarray
    cached: np.ndarray  # prompt tokens found in the prefix cache
    gaps: np.ndarray  # between a token and the one before it, of all requests, one after the other by uid
    steps: list[Step]
    stats: dict[str, int]  # the scheduler's, at the end
    fewest_free: int  # pages: free, or cached and used by nobody


class Outputs:
    """Notes when each request's tokens came. All requests of a step get theirs at the same time."""

    def __init__(self, count: int, num_pages: int) -> None:
        self.count = count
        self.fewest_free = num_pages
        self.cached = np.zeros(count, dtype=np.int64)
        self._uids: list[int] = []  # of all tokens
        self._steps: list[tuple[int, int]] = []  # when, and how many tokens

    def add(self, outputs: list[TokenOutput], now: int) -> None:
        self._uids += [output.uid for output in outputs]
        self._steps.append((now, len(outputs)))

    def times(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the first and the last token of each uid, and between each and the one before it."""
        uids = np.array(self._uids, dtype=np.int64)
        now, tokens = np.array(self._steps, dtype=np.int64).reshape(-1, 2).T
        order = np.argsort(uids, kind="stable")
        uids, times = uids[order], np.repeat(now, tokens)[order]
        is_first, is_last = np.ones(len(uids), dtype=bool), np.ones(len(uids), dtype=bool)
        is_first[1:] = is_last[:-1] = uids[1:] != uids[:-1]
        first, last = np.full(self.count, NEVER), np.full(self.count, NEVER)
        first[uids[is_first]], last[uids[is_last]] = times[is_first], times[is_last]
        return first, last, np.diff(times, prepend=0)[~is_first]


def simulate(
    arrivals: list[Arrival],
    config: OverlapConfig,
    model: ModelConfig,
    device: Device,
    trace: Path | None = None,
    create_policy: CreatePolicy = create_policy,
) -> Result:
    """Serve all arrivals; their uids are 0, 1, 2, ... in any order. A request that is longer than the model or the
    pool allows is refused, with all that come after its answer: their times stay NEVER. create_policy: another that
    makes the scheduler's policy."""
    clock = VirtualClock()
    tracer = VirtualTracer(trace, clock)
    engine = SimulatedEngine(
        config, CostModel(model, device), longest(arrivals, config, model), tracer, lengths(arrivals)
    )
    result = serve(engine, arrivals, config, tracer, create_policy=create_policy)
    tracer.close()
    if trace is not None:
        merge(trace)
    return result


def longest(arrivals: Sequence[Arrival], config: OverlapConfig, model: ModelConfig) -> int:
    """Tokens of the longest request that the model has positions for."""
    limit = min(config.max_seq_len or model.max_position, model.max_position)
    found = max((arrival.max_len for arrival in arrivals if arrival.max_len <= limit), default=0)
    if found == 0:
        remedy = "raise --max-seq-len" if limit < model.max_position else "give shorter ones, or another model"
        raise ValueError(f"no request has at most {limit} tokens, prompt and max_tokens: {remedy}")
    return found


def lengths(arrivals: Sequence[Arrival]) -> np.ndarray:
    """Tokens of each, prompt and answer, by uid."""
    found = np.zeros(len(arrivals), dtype=np.int64)
    for arrival in arrivals:
        found[arrival.uid] = arrival.prompt_len + arrival.output_len
    return found


def serve(
    engine: SimulatedEngine,
    arrivals: list[Arrival],
    config: OverlapConfig,
    tracer: Tracer,
    vocab_size: int = TOKEN_IDS,
    create_policy: CreatePolicy = create_policy,
) -> Result:
    """By the loops of stage 7. engine: or a real one that keeps `clock` and `steps` as a simulated one does, without
    overlap. vocab_size: the token that ends an answer; all others are below."""
    clock = engine.clock
    scheduler = Scheduler(config, cast(Engine, engine), frozenset({vocab_size}), tracer, create_policy)
    most = min(engine.max_seq_len, engine.pool.num_pages * config.page_size + 1)  # the last token is never computed
    inbox = ArrivalInbox([arrival for arrival in arrivals if arrival.max_len <= most], clock, vocab_size)
    if config.disable_overlap:
        loop = LLM.plain_loop(scheduler, inbox)
    else:
        loop = LLM.overlap_loop(scheduler, inbox, SimulatedStream(clock))
    found = _serve(loop, scheduler, inbox, Outputs(len(arrivals), engine.pool.num_pages))
    arrived = np.full(len(arrivals), NEVER)
    arrived[list(inbox.arrived)] = list(inbox.arrived.values())
    first, last, gaps = found.times()
    order = [arrival.uid for arrival in arrivals]
    return Result(
        arrivals,
        arrived=arrived[order],
        first=first[order],
        last=last[order],
        cached=found.cached[order],
        gaps=gaps,
        steps=engine.steps,
        stats=scheduler.stats(),
        fewest_free=found.fewest_free,
    )


def _serve(loop: Steps, scheduler: Scheduler, inbox: ArrivalInbox, found: Outputs) -> Outputs:
    for outputs in loop:
        if outputs:
            found.add(outputs, inbox.clock.now)
            for output in outputs:
                if output.finish_reason is not None:
                    found.cached[output.uid] = output.cached_tokens
                    inbox.ended(output.uid)
        found.fewest_free = min(found.fewest_free, scheduler.cache.available_pages)
    scheduler.check_integrity()
    return found
