"""Goodput: requests a second that came out as promised, of a simulated run. Knows nothing of policies.

A request that came too late is work done for nobody. After DistServe (Zhong et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.benchmark.simulation import NEVER, Result

PERCENT = 99  # of a request's own gaps between tokens


@dataclass(frozen=True)
class Limits:
    """What is promised to each request. Seconds."""

    ttft: float  # to its first token
    itl: float  # between its tokens, at the 99th percentile

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft), ("itl", self.itl)):
            if not value > 0:
                raise ValueError(f"the limit of {name} must be more than 0 s, not {value}")


def first_in_time(result: Result, limits: Limits) -> np.ndarray:
    """Which requests had their first token in time: bool, by position in `arrivals`."""
    return (result.first != NEVER) & (result.first - result.arrived <= limits.ttft * 1e9)


def others_in_time(result: Result, limits: Limits) -> np.ndarray:
    """Which requests had their further tokens in time: bool, by position in `arrivals`."""
    found = np.zeros(len(result.arrivals), dtype=bool)
    served = sorted(np.flatnonzero(result.last != NEVER), key=lambda i: result.arrivals[i].uid)
    counts = [result.arrivals[i].output_len - 1 for i in served]
    for i, gaps in zip(served, np.split(result.gaps, np.cumsum(counts)[:-1]), strict=True):
        found[i] = len(gaps) == 0 or np.percentile(gaps, PERCENT) <= limits.itl * 1e9
    return found


def in_time(result: Result, limits: Limits) -> np.ndarray:
    """Which requests kept both limits: bool, by position in `arrivals`. One that was refused did not."""
    return first_in_time(result, limits) & others_in_time(result, limits)


def goodput(result: Result, limits: Limits) -> float:
    """Requests that kept both limits, of those that arrived in a second of virtual time. Raises ValueError when all
    arrived at once: then there is no rate to speak of."""
    arrived = result.arrived[result.arrived != NEVER]
    if not len(arrived) or arrived.max() == arrived.min():
        raise ValueError("goodput is a rate: the requests must not all arrive at once")
    return float(in_time(result, limits).sum() / (arrived.max() - arrived.min()) * 1e9)
