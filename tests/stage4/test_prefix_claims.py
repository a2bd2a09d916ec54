"""What stage 4 claims, counted on a tiny model: each prefix is computed once, and the answers are the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import make_tiny_model

from minisgl.core.outputs import Completion
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage4.llm import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", **{"num_pages": 400, "page_size": 4, **options})


def answers(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def words(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def watch(llm: LLM, look: Callable[[Any], Any]) -> list[Any]:
    """What `look` makes of each batch, once it is launched."""
    seen: list[Any] = []
    forward = llm.engine.forward_batch

    def watched(batch: Any, args: Any) -> Any:
        seen.append(look(batch))
        return forward(batch, args)

    llm.engine.forward_batch = watched  # type: ignore[method-assign]
    return seen


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def conversation(turns: list[Completion]) -> list[list[int]]:
    """What users send next: their own prompts and answers again, and a little more; and one that is new."""
    return [[*words(seed, 40), *turn.token_ids, *words(70 + seed, 5)] for seed, turn in enumerate(turns)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_hits_are_the_whole_pages_of_what_is_shared_and_computed_tokens_fall_by_as_much(
    folder: Path, page_size: int
) -> None:
    """Hazard 5 is among the prompts: equal ones, prefixes of others, and lengths of whole pages."""
    base = words(0, 40)
    first = [base, [*base[:33], *words(1, 9)], base, base[:32], words(2, 48), base[:1], [*base, *words(3, 24)]]
    computed, hits = {}, {}
    for cache in ("radix", "naive"):
        with make_llm(folder, page_size=page_size, cache=cache, num_pages=6400 // page_size) as llm:
            tokens = watch(llm, lambda batch: batch.num_tokens)
            known: list[list[int]] = []
            expected = 0
            for prompts in (first, [[*base, 7, 7, 7], *first[::-1]]):
                completions = llm.generate(prompts, answers(6))
                for prompt, completion in zip(prompts, completions, strict=True):
                    shared = max([min(common(prompt, other), len(prompt) - 1) for other in known], default=0)
                    hit = shared // page_size * page_size if cache == "radix" else 0
                    assert completion.cached_tokens == hit
                    expected += hit
                    known.append(prompt)
                known += [[*p, *c.token_ids[:-1]] for p, c in zip(prompts, completions, strict=True)]
            llm.manager.check_integrity([])
            computed[cache], hits[cache] = sum(tokens), llm.stats()["hit_tokens"]
            assert hits[cache] == expected
    assert hits["radix"] > 200
    assert computed["naive"] == sum(map(len, first)) * 2 + 43 + 15 * 5
    assert computed["radix"] == computed["naive"] - hits["radix"]


def test_turn_two_finds_prompt_and_answer_of_turn_one(folder: Path) -> None:
    """All of it but the last token, whose KV nobody computed."""
    with make_llm(folder, page_size=1) as llm:
        turn_one = llm.generate([words(0, 40), words(1, 40)], answers(8))
        turn_two = llm.generate(conversation(turn_one), answers(8))
    assert [turn.cached_tokens for turn in turn_two] == [47, 47]


def test_logits_and_answers_are_those_without_a_cache(folder: Path) -> None:
    logits: dict[str, list[torch.Tensor]] = {}
    token_ids: dict[str, list[list[int]]] = {}
    for cache in ("radix", "naive"):
        with make_llm(folder, cache=cache) as llm:
            logits[cache] = []
            hook = llm.engine.model.register_forward_hook(lambda *args, to=logits[cache]: to.append(args[2].clone()))
            turn_one = llm.generate([words(0, 40), words(1, 40), words(0, 40)], answers(8))
            turn_two = llm.generate(conversation(turn_one), answers(8))
            hook.remove()
            token_ids[cache] = [turn.token_ids for turn in (*turn_one, *turn_two)]
    for radix, naive in zip(logits["radix"], logits["naive"], strict=True):
        torch.testing.assert_close(radix, naive, atol=1e-4, rtol=1e-4)
    assert token_ids["radix"] == token_ids["naive"]


def test_answers_survive_eviction(folder: Path) -> None:
    """A pool that holds two of five conversations; after each call every page is free or in the tree."""
    token_ids: dict[str, list[list[int]]] = {}
    for cache in ("radix", "naive"):
        with make_llm(folder, cache=cache, num_pages=30) as llm:
            token_ids[cache] = []
            for call in range(4):
                prompts = [[*words(seed, 30), *words(seed + call, 9)] for seed in range(5)]
                token_ids[cache] += [turn.token_ids for turn in llm.generate(prompts, answers(6))]
                llm.manager.check_integrity([])
                stats = llm.stats()
                assert stats["pages_free"] + stats["pages_cached"] == 30
            assert (llm.manager.evicted_tokens > 0) == (cache == "radix")
    assert token_ids["radix"] == token_ids["naive"]


def test_a_shared_prefix_takes_room_once(folder: Path) -> None:
    """Four requests of 18 pages each run together in 32, since 16 of the 18 are the same."""
    shared = words(0, 64)
    prompts = [[*shared, *words(seed, 4)] for seed in range(1, 5)]
    with make_llm(folder, num_pages=32) as llm:
        sizes = watch(llm, lambda batch: batch.size)
        llm.generate(prompts, answers(5))
        assert sizes == [1, 1, 1, 1, 4, 4, 4, 4]
    with make_llm(folder, num_pages=32, cache="naive") as llm:
        sizes = watch(llm, lambda batch: batch.size)
        llm.generate(prompts, answers(5))
        assert sizes == [1] * 20


def test_a_group_is_no_larger_than_the_rows(folder: Path) -> None:
    with make_llm(folder, max_running_requests=2) as llm:
        sizes = watch(llm, lambda batch: batch.size)
        llm.generate([words(seed, 9) for seed in range(3)], answers(2))
        assert sizes == [1, 1, 2, 1, 1]


@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_interrupted_forward_costs_no_pages_and_caches_nothing_that_was_not_computed(folder: Path, at: int) -> None:
    """Ctrl-C in a notebook: in the first prefill, the second, and while decoding."""
    prompts = [words(0, 40), words(1, 40)]
    with make_llm(folder) as llm:
        forward, calls = llm.engine.forward_batch, iter(range(100))

        def interrupted(batch: Any, args: Any) -> Any:
            if next(calls) == at:
                raise KeyboardInterrupt
            return forward(batch, args)

        llm.engine.forward_batch = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, answers(8))
        llm.manager.check_integrity([])
        after = [completion.token_ids for completion in llm.generate(prompts, answers(8))]
    with make_llm(folder) as llm:
        assert after == [completion.token_ids for completion in llm.generate(prompts, answers(8))]


def test_a_stream_that_is_closed_leaves_what_it_computed_to_others(folder: Path) -> None:
    prompt = words(0, 40)
    with make_llm(folder) as llm:
        with closing(llm.stream([prompt], answers(50))) as chunks:
            for _ in range(6):
                next(chunks)
        llm.manager.check_integrity([])
        assert llm.generate([[*prompt, 1]], answers(1))[0].cached_tokens == 40


def test_the_trace_shows_pages_and_evictions(folder: Path, tmp_path: Path) -> None:
    from minisgl.core.trace import read_events

    trace = tmp_path / "trace.json"
    with make_llm(folder, num_pages=12, trace=str(trace)) as llm:
        for seed in range(3):
            llm.generate([words(seed, 30)], answers(4))
        given_up = llm.manager.evicted_tokens
    events = read_events(trace)
    pages = [event.args for event in events if event.name == "pages"]
    assert pages
    assert all(sum(values.values()) == 12 for values in pages)
    evicted = [event.args["tokens"] for event in events if event.name == "evict"]
    assert sum(evicted) == given_up > 0
