"""Goodput by hand, and a policy from outside the package: it decides, and the numbers are its own."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from minisgl.benchmark.arrivals import Arrival, Load, Segment, lognormal
from minisgl.benchmark.goodput import Limits, first_in_time, goodput, in_time, others_in_time
from minisgl.benchmark.models import CONFIGS
from minisgl.benchmark.simulation import NEVER, Result, simulate
from minisgl.models.config import ModelConfig
from minisgl.stage5.cost_model import H200
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.policies import Mixed
from minisgl.stage7.config import OverlapConfig

MS = 1_000_000
LIMITS = Limits(ttft=0.1, itl=0.02)


def by_hand(first: list[int], gaps: list[int], outputs: list[int], uids: list[int] | None = None) -> Result:
    """Requests that arrive a second apart. first: ms after its arrival, or NEVER. gaps: ms, by uid."""
    count = len(first)
    ids = uids or list(range(count))
    arrivals = [Arrival(uid, (Segment(0, 8),), n, 0) for uid, n in zip(ids, outputs, strict=True)]
    arrived = np.arange(count) * 1000 * MS
    at = np.array([NEVER if ms == NEVER else now + ms * MS for now, ms in zip(arrived, first, strict=True)])
    nothing = np.zeros(count, dtype=np.int64)
    return Result(arrivals, arrived, at, at, nothing, np.array(gaps) * MS, [], {}, 0)


def test_a_request_must_keep_both_limits() -> None:
    result = by_hand(first=[100, 101, 50, 50], gaps=[20, 20, 5, 5, 21, 21], outputs=[3, 3, 3, 1])
    assert first_in_time(result, LIMITS).tolist() == [True, False, True, True]
    assert others_in_time(result, LIMITS).tolist() == [True, True, False, True]
    assert in_time(result, LIMITS).tolist() == [True, False, False, True]
    assert goodput(result, LIMITS) == pytest.approx(2 / 3)


def test_gaps_go_to_their_requests() -> None:
    """They are in the order of uids, which need not be that of the arrivals; who was refused has none."""
    result = by_hand(first=[1, NEVER, 1], gaps=[30, 30, 1], outputs=[2, 9, 3], uids=[2, 1, 0])
    assert others_in_time(result, LIMITS).tolist() == [True, False, False]


def test_one_late_token_in_many_is_forgiven() -> None:
    gaps = [1] * 299 + [1000]
    assert in_time(by_hand([1], gaps, [301]), LIMITS).tolist() == [True]
    assert in_time(by_hand([1], [1] * 9 + [1000], [11]), LIMITS).tolist() == [False]


def test_what_is_no_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="must not all arrive at once"):
        goodput(by_hand([1], [], [1]), LIMITS)
    with pytest.raises(ValueError, match="ttft must be more than 0"):
        Limits(ttft=0, itl=1)


class ShortestLast(Mixed):
    def order(self, waiting: Iterable[PendingReq], departed: int) -> Iterable[PendingReq]:
        return sorted(waiting, key=lambda pending: (not pending.is_resumed, -len(pending.input_ids)))


def test_a_policy_from_outside_decides() -> None:
    """Under a load that is too much the longest prompts, and not the first to come, have their first token first."""
    arrivals = lognormal(Load(requests=60, rate=200, prompt_len=1024, output_len=8))
    config, model = OverlapConfig(num_pages=8192), ModelConfig.from_dict(CONFIGS["llama-3.1-8b"])
    ours = simulate(arrivals, config, model, H200)
    theirs = simulate(arrivals, config, model, H200, create_policy=lambda config, cached_len: ShortestLast())
    lengths = np.array([arrival.prompt_len for arrival in arrivals])
    long = lengths > np.percentile(lengths, 80)
    waits = [[float((r.first - r.arrived)[which].mean()) for r in (ours, theirs)] for which in (long, ~long)]
    assert waits[0][0] > waits[0][1], "long prompts do not gain"
    assert waits[1][0] < waits[1][1], "short prompts do not lose"
    limits = Limits(ttft=0.3, itl=0.1)
    assert goodput(theirs, limits) < goodput(ours, limits)
