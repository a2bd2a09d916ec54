"""Scheduling policies beside each other: the same requests, the same device, whose goodput? Has no policy of its own.

A policy here is what makes one: `create_policy` of stage 5, or any function with its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from minisgl.benchmark.arrivals import WORKLOADS, Load, asking_for
from minisgl.benchmark.goodput import Limits, goodput
from minisgl.benchmark.models import CONFIGS
from minisgl.benchmark.records import table
from minisgl.benchmark.simulation import Result, simulate
from minisgl.core.batch import Batch
from minisgl.models.config import ModelConfig
from minisgl.stage5.cost_model import H200
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.policies import CreatePolicy, Decode, Prefill, SchedulePolicy, create_policy
from minisgl.stage7.config import OverlapConfig

LIMITS = Limits(ttft=1.0, itl=0.1)
# Requests a second: at the edge of what first come, first served can do, and past it three times.
RATES = {"lognormal": 42.0, "long-prompt": 34.0, "bursts": 18.0, "shared-prefix": 140.0}
REQUESTS, PROMPT_LEN, OUTPUT_LEN, MAX_TOKENS = 300, 1024, 128, 2048
CONFIG = OverlapConfig(max_prefill_length=2048)
Results = dict[str, dict[str, Result]]  # policy -> workload -> what happened


class Refereed:
    """A policy that is held to what `SchedulePolicy` and the budget of a step ask for."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self.policy = policy

    def order(self, waiting: Iterable[PendingReq], departed: int) -> Iterable[PendingReq]:
        queue = list(waiting)
        ordered = list(self.policy.order(queue, departed))
        begun = [pending for pending in queue if pending.is_resumed]
        if ordered[: len(begun)] != begun:
            raise ValueError("order: requests that were begun (is_resumed) must stay in front, in the order they have")
        return ordered

    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        batch = self.policy.compose(token_budget, prefill, decode)
        tokens = sum(req.extend_len for req in batch.reqs)
        if tokens > token_budget:
            raise ValueError(f"compose: a step of {tokens} tokens, and its budget is {token_budget}")
        return batch


def built_in(name: str) -> CreatePolicy:
    """One of --schedule-policy."""
    return lambda config, cached_len: create_policy(replace(config, schedule_policy=name), cached_len)


def compete(policies: Mapping[str, CreatePolicy], seed: int = 0) -> Results:
    """All of them serve all workloads. Raises ValueError when a policy does what none may."""
    model = ModelConfig.from_dict(CONFIGS["llama-3.1-8b"])
    found: Results = {name: {} for name in policies}
    for workload, rate in RATES.items():
        arrivals = WORKLOADS[workload](Load(REQUESTS, rate, PROMPT_LEN, OUTPUT_LEN, seed))
        arrivals = asking_for(MAX_TOKENS, arrivals)
        for name, create in policies.items():
            refereed = _refereed(create)
            found[name][workload] = simulate(arrivals, CONFIG, model, H200, create_policy=refereed)
    return found


def _refereed(create: CreatePolicy) -> CreatePolicy:
    return lambda config, cached_len: Refereed(create(config, cached_len))


def scores(results: Results) -> dict[str, dict[str, float]]:
    """policy -> workload -> requests a second that kept both limits."""
    return {name: {w: goodput(result, LIMITS) for w, result in of.items()} for name, of in results.items()}


def show(results: Results) -> str:
    """The table: goodput, and in brackets the longest that anybody waited for a first token, in seconds."""
    some = next(iter(results.values()))
    spans = {w: (some[w].arrived.max() - some[w].arrived.min()) / 1e9 for w in RATES}
    rows = [["goodput (longest TTFT)", *RATES], ["all that came", *(f"{REQUESTS / spans[w]:.1f}" for w in RATES)]]
    for name, by_workload in scores(results).items():
        waits = {w: (r.first - r.arrived).max() / 1e9 for w, r in results[name].items()}
        rows.append([name, *(f"{by_workload[w]:.1f} ({waits[w]:.1f} s)" for w in RATES)])
    return table(rows)
