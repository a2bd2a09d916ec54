"""The contest is fair: what a policy may not do is refused, and the package's own do no such thing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from minisgl.benchmark import contest
from minisgl.core.batch import Batch
from minisgl.stage5.pending import PendingReq
from minisgl.stage5.policies import Decode, Mixed, Prefill
from minisgl.stage7.config import OverlapConfig


class ForgetsWhoWasBegun(Mixed):
    def order(self, waiting: Iterable[PendingReq], departed: int) -> Iterable[PendingReq]:
        return sorted(waiting, key=lambda pending: len(pending.input_ids))


class Greedy(Mixed):
    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        return super().compose(2 * token_budget, prefill, decode)


class Patient(Mixed):
    def compose(self, token_budget: int, prefill: Prefill, decode: Decode) -> Batch:
        return super().compose(min(token_budget, 512), prefill, decode)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "REQUESTS", 60)
    monkeypatch.setattr(contest, "RATES", {"long-prompt": 60.0, "lognormal": 80.0})


@pytest.mark.parametrize(("policy", "words"), [(ForgetsWhoWasBegun, "must stay in front"), (Greedy, "its budget is")])
def test_what_is_not_allowed_is_refused(policy: type[Mixed], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        contest.compete({"it": lambda config, cached_len: policy()})


def test_the_referee_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = {name: contest.built_in(name) for name in ("prefill-first", "mixed", "cache-aware")}
    refereed = contest.scores(contest.compete(built_in))
    monkeypatch.setattr(contest, "_refereed", lambda create: create)
    assert contest.scores(contest.compete(built_in)) == refereed
    assert refereed["prefill-first"] != refereed["mixed"]


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed the same numbers, and each policy's under its name."""
    policies = {"mixed": contest.built_in("mixed"), "patient": lambda config, cached_len: Patient()}
    results = contest.compete(policies)
    assert contest.scores(results) == contest.scores(contest.compete(policies))
    names = [line.split("  ")[0] for line in contest.show(results).splitlines()]
    assert names[0].startswith("goodput")
    assert names[2:] == ["all that came", "mixed", "patient"]
    smaller = OverlapConfig(max_prefill_length=512)
    monkeypatch.setattr(contest, "CONFIG", smaller)
    assert contest.scores(contest.compete({"mixed": policies["mixed"]}))["mixed"] == contest.scores(results)["patient"]
