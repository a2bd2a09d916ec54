"""The workloads are those that others are measured with, and numbers mean what they say."""

from __future__ import annotations

import random
import statistics

import pytest

from minisgl.benchmark.records import percentiles
from minisgl.benchmark.workload import OfflineWorkload, random_prompts, texts


def test_offline_workload_is_nano_vllm_s() -> None:
    load = OfflineWorkload.draw(256, (100, 1024), 151936)
    assert sum(map(len, load.prompts)) == 142_827
    assert sum(load.output_lens) == 133_966
    lengths = [*map(len, load.prompts), *load.output_lens]
    assert min(lengths) >= 100
    assert max(lengths) <= 1024


def test_offline_workload_fits_a_small_vocabulary() -> None:
    load = OfflineWorkload.draw(4, (3, 9), 50)
    assert max(map(max, load.prompts)) < 50


def test_warm_up_prompts_have_the_same_lengths_and_no_prefix_in_common() -> None:
    load = OfflineWorkload.draw(256, (100, 1024), 151936)
    other = load.other_tokens()
    assert [*map(len, other)] == [*map(len, load.prompts)]
    assert {tuple(p[:8]) for p in other}.isdisjoint(tuple(p[:8]) for p in load.prompts)
    assert min(map(min, other)) >= 0


def test_other_seeds_give_other_prompts() -> None:
    first, second = (random_prompts(3, 20, 1000, seed) for seed in "ab")
    assert [len(p) for p in first] == [20] * 3
    assert {tuple(p[:4]) for p in first}.isdisjoint(tuple(p[:4]) for p in second)
    assert first == random_prompts(3, 20, 1000, "a")
    assert len({text[:20] for text in texts(50, 10, "a") + texts(50, 10, "b")}) == 100
    assert all(len(text.split()) == 10 for text in texts(5, 10, "a"))


@pytest.mark.parametrize("count", [2, 7, 100])
def test_percentiles(count: int) -> None:
    values = [random.Random(count).random() for _ in range(count)] + [5.0]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert percentiles(values) == pytest.approx({"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]})
    assert percentiles(values)["p50"] == pytest.approx(statistics.median(values))
