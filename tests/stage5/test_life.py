"""The scheduler's life: any arrivals and aborts, policies, pools, pages and both orders of its calls."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_life import ADMISSIONS, POLICIES, SHARED, Life, random_life


class Machine(RuleBasedStateMachine):
    """Hypothesis looks for a life in which something breaks, and makes it short. What must hold is in `Life`."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        extra=st.sampled_from([0, 8, 40]),
        rows=st.integers(1, 5),
        budget=st.integers(1, 40),
        cache=st.sampled_from(["radix", "naive"]),
        overlap=st.booleans(),
        policy=st.sampled_from(POLICIES),
        admission=st.sampled_from(ADMISSIONS),
        estimate=st.sampled_from([None, 0, 5]),
    )
    def start(self, policy: str, **options: Any) -> None:
        self.life = Life(schedule_policy=policy, **options)

    @rule(shared=st.integers(0, len(SHARED)), tail=st.lists(st.integers(1, 49), max_size=12), length=st.integers(1, 22))
    def arrive(self, shared: int, tail: list[int], length: int) -> None:
        self.life.arrive(SHARED[:shared] + tail or [7], length)

    @precondition(lambda self: self.life.asked)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        self.life.abort(data.draw(st.integers(0, len(self.life.asked) - 1)))

    @rule(ticks=st.integers(1, 8))
    def tick(self, ticks: int) -> None:
        for _ in range(ticks):
            self.life.tick()

    @rule()
    def finish(self) -> None:
        self.life.finish()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.slow
def test_thousands_of_ticks() -> None:
    lives = [random_life(seed, ticks=150) for seed in range(24)]
    assert sum(life.now for life in lives) > 4000
    assert sum(life.ranks[0].scheduler.retractions for life in lives) > 20, "hardly anything was retracted"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_ticks() -> None:
    ticks, requests, retractions, seed = 0, 0, 0, 1_000_000
    while ticks < 1_000_000:
        life = random_life(seed, ticks=1000)
        ticks, requests, seed = ticks + life.now, requests + len(life.asked), seed + 1
        retractions += life.ranks[0].scheduler.retractions
        print(f"{seed - 1_000_000} lives: {ticks} ticks, {requests} requests, {retractions} retractions", flush=True)


def digest(seed: int) -> str:
    """Of all batches and answers of a life."""
    life = random_life(seed, ticks=150)
    batches = [rank.engine.batches for rank in life.ranks]
    answers = [(asked.tokens, asked.reason, asked.cached_tokens) for asked in life.asked.values()]
    return hashlib.sha256(json.dumps([batches, answers]).encode()).hexdigest()


def test_replays_are_the_same() -> None:
    """Hazard 10: in another process, whose hashes and clock differ, every step has the same members."""
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = {[str(here), str(here.parent)]}; from test_life import digest; print(digest(3))"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert again.stdout.strip() == digest(3)
