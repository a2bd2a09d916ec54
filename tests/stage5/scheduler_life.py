"""Schedulers under a life of arrivals and aborts, with everything that must hold checked in every tick.

Each request is served by two schedulers, as by two ranks: fed the same orders, they must take the same decisions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from fake_engine import EOS, FakeEngine, plain_loop

from minisgl.core.batch import ForwardInput, ForwardOutput
from minisgl.core.outputs import TokenOutput
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Tracer
from minisgl.stage3.page_count import max_pages
from minisgl.stage5.admission import EstimatedOutput
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.policies import CacheAware
from minisgl.stage5.scheduler import Scheduler

MAX_SEQ_LEN = 64
SHARED = list(range(10, 40))  # prompts begin with a part of it
POLICIES = ("prefill-first", "mixed", "cache-aware")
ADMISSIONS = ("reserve", "estimate")


def make(num_pages: int, page_size: int, rows: int, budget: int, **options: Any) -> tuple[Scheduler, FakeEngine]:
    engine = FakeEngine(num_pages, page_size, rows, MAX_SEQ_LEN)
    config = SchedulerConfig(page_size=page_size, max_running_requests=rows, max_prefill_length=budget, **options)
    return Scheduler(config, engine, frozenset({EOS}), Tracer(None)), engine  # type: ignore[arg-type]


def drain(scheduler: Scheduler) -> dict[int, list[int]]:
    """Run until nothing is left, without overlap. The tokens of each request."""
    tokens: dict[int, list[int]] = {}
    while scheduler.has_work:
        forward_input = scheduler.schedule()
        assert forward_input is not None, "work, and nothing to run"
        for output in scheduler.commit(forward_input, scheduler.forward(forward_input)):
            assert output.token_id is not None
            tokens.setdefault(output.uid, []).append(output.token_id)
        scheduler.check_integrity()
    return tokens


def fix_estimate(scheduler: Scheduler, tokens: int) -> None:
    """Admit as if every answer had so many tokens, and when it has more, one more."""
    if isinstance(scheduler.admission, EstimatedOutput):
        scheduler.admission.mean_output, scheduler.admission.MARGIN = tokens, 1
        scheduler.admission.note_finished = lambda output_len: None  # type: ignore[method-assign]


class Rank:
    """One scheduler. With `overlap` a batch is committed only after the next one was scheduled."""

    def __init__(self, overlap: bool, num_pages: int, **options: Any) -> None:
        self.overlap = overlap
        self.scheduler, self.engine = make(num_pages, **options)
        self.last: tuple[ForwardInput, ForwardOutput] | None = None

    @property
    def idle(self) -> bool:
        return self.last is None and not self.scheduler.has_work

    def tick(self) -> tuple[ForwardInput | None, list[TokenOutput]]:
        forward_input = self.scheduler.schedule()
        now = None if forward_input is None else (forward_input, self.scheduler.forward(forward_input))
        assert now or self.last or not self.scheduler.has_work, "deadlock"
        done, self.last = (self.last, now) if self.overlap else (now, None)
        return forward_input, self.scheduler.commit(*done) if done else []


@dataclass
class Asked:
    prompt: list[int]
    max_tokens: int
    deadline: int  # the tick by which its next token must have come
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    cached_tokens: int | None = None

    @property
    def work(self) -> int:
        return len(self.prompt) + self.max_tokens


class Life:
    def __init__(
        self,
        page_size: int,
        extra: int,
        rows: int,
        budget: int,
        overlap: bool,
        estimate: int | None = None,
        **options: Any,
    ) -> None:
        """extra: tokens the pool has room for beside the longest request. estimate: of every answer, in place of what
        would be learnt; nothing may depend on how good it is."""
        self.num_pages = -(-MAX_SEQ_LEN // page_size) + extra // page_size
        self.page_size, self.budget, self.options = page_size, budget, options
        options |= {"page_size": page_size, "rows": rows, "budget": budget}
        self.ranks = [Rank(overlap, self.num_pages, **options) for _ in range(2)]
        if estimate is not None:
            for rank in self.ranks:
                fix_estimate(rank.scheduler, estimate)
        self.asked: dict[int, Asked] = {}
        self.live: dict[int, Asked] = {}
        self.now = 0

    def arrive(self, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        assert max_pages(len(prompt), params, self.page_size) <= self.num_pages
        uid = len(self.asked)
        self.asked[uid] = self.live[uid] = Asked(prompt, max_tokens, 0)
        self.live[uid].deadline = self.deadline()
        if self.options["schedule_policy"] == "prefill-first":  # who runs stands still for who comes later
            for asked in self.live.values():
                asked.deadline += 2 * self.live[uid].work
        for rank in self.ranks:
            rank.scheduler.add(uid, prompt, params)

    def deadline(self) -> int:
        """The bound on waiting, for a first token and between two: twice as many ticks as there are tokens, of prompts
        and answers, in the requests that are there (each tick computes one of them at least; what is computed again
        after a retraction is the other half). A cache-aware order lets a stated number of others go first."""
        work = sum(asked.work for asked in self.live.values())
        if self.options["schedule_policy"] == "cache-aware":
            work += CacheAware.MAX_OVERTAKEN * MAX_SEQ_LEN
        return self.now + 2 * work

    def abort(self, uid: int) -> None:
        outputs, twins = (rank.scheduler.abort(uid) for rank in self.ranks)
        assert len(outputs) == (uid in self.live), "one terminal message each"
        self.take(outputs, twins)
        self.ranks[0].scheduler.check_integrity()

    def tick(self) -> None:
        self.now += 1
        (batch, outputs), (_, twins) = (rank.tick() for rank in self.ranks)
        if batch is not None:
            assert 0 < len(batch.batch.positions) <= max(self.budget, batch.batch.num_decode), "over the budget"
            assert self.ranks[0].engine.batches[-1] == self.ranks[1].engine.batches[-1], "the ranks decide differently"
        self.take(outputs, twins)
        for uid, asked in self.live.items():
            assert self.now <= asked.deadline, f"request {uid} starves"
        self.ranks[0].scheduler.check_integrity()  # the other decides the same

    def take(self, outputs: list[TokenOutput], twins: list[TokenOutput]) -> None:
        assert outputs == twins, "the ranks answer differently"
        for output in outputs:
            assert output.uid in self.live, "a message after the terminal one"
            asked = self.live[output.uid]
            asked.deadline = self.deadline()
            assert asked.cached_tokens in (None, output.cached_tokens), "usage changes"
            assert 0 <= output.cached_tokens < len(asked.prompt)
            asked.cached_tokens, asked.reason = output.cached_tokens, output.finish_reason
            if output.token_id is not None:
                asked.tokens.append(output.token_id)
            if asked.reason:
                del self.live[output.uid]
                self.check_tokens(asked)

    def check_tokens(self, asked: Asked) -> None:
        expected, reason = plain_loop(asked.prompt, asked.max_tokens)
        assert asked.tokens == expected[: len(asked.tokens)]
        if asked.reason != "abort":
            assert (asked.tokens, asked.reason) == (expected, reason)

    def finish(self) -> None:
        """Run until nothing is left: all has ended, and all is free."""
        while not self.ranks[0].idle:
            self.tick()
        assert not self.live
        for rank in self.ranks:
            rank.scheduler.check_integrity()
            stats = rank.scheduler.stats()
            assert rank.idle
            assert stats["pages_free"] + stats["pages_cached"] == self.num_pages
            assert rank.scheduler.cache.cache.protected_size == 0
            assert stats["rows_free"] == rank.scheduler.tables.num_rows


def random_life(seed: int, ticks: int) -> Life:
    """A life of so many ticks, drawn from a seed: calm hours and rush hours."""
    draw = random.Random(seed)
    life = Life(
        page_size=draw.choice([1, 4, 16]),
        extra=draw.choice([0, 0, 20, 200]),
        rows=draw.choice([1, 2, 4, 6, 8]),
        budget=draw.choice([1, 3, 8, 20, 60]),
        overlap=draw.random() < 0.5,
        estimate=draw.choice([None, 0, 1, 6]),
        cache=draw.choice(["radix", "radix", "naive"]),
        schedule_policy=draw.choice(POLICIES),
        admission=draw.choice([*ADMISSIONS, "estimate"]),
    )
    rate = 0.0
    for tick in range(ticks):
        if tick % 100 == 0:
            rate = draw.choice([0.02, 0.1, 0.3])
        if draw.random() < rate and len(life.live) < 40:
            tail = [draw.randint(1, 49) for _ in range(draw.randint(1, 12))]
            prompt = SHARED[: draw.choice([0, 0, 0, 5, 16, 30])] + tail
            life.arrive(prompt, draw.choice([draw.randint(1, 8), MAX_SEQ_LEN - len(prompt)]))
        if life.asked and draw.random() < 0.03:
            life.abort(draw.choice(list(life.live or life.asked)))
        if not life.ranks[0].idle:
            life.tick()
    life.finish()
    return life
