"""What stages 1 to 3 claim, counted on a tiny model: tokens through the embedding, and slots that hold nothing."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import FrozenInstanceError, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import make_tiny_model

from minisgl.core.sampling_params import SamplingParams

PROMPT, NEW = 64, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with importlib.import_module("minisgl.stage1.llm").LLM(str(folder), dtype="float32") as llm:
        yield llm


@contextmanager
def count(model: torch.nn.Module) -> Generator[dict[str, Any], None, None]:
    """Tokens that entered the embedding, and the logits that came out."""
    seen: dict[str, Any] = {"tokens": 0, "logits": []}

    def entered(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen["tokens"] += len(args[0])

    def left(module: Any, args: Any, logits: torch.Tensor) -> None:
        seen["logits"].append(logits[-1].clone())

    hooks = [model.model.embed_tokens.register_forward_pre_hook(entered), model.register_forward_hook(left)]  # type: ignore[union-attr,operator]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def run(stage: int, folder: Path, prompts: list[list[int]], **options: Any) -> tuple[dict[str, Any], Any]:
    llm_class = importlib.import_module(f"minisgl.stage{stage}.llm").LLM
    with llm_class(str(folder), dtype="float32", **options) as llm:
        model = llm.model if stage < 3 else llm.engine.model
        with count(model) as seen:
            completions = llm.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
    return seen, completions


def prompt(seed: int = 0) -> list[int]:
    return torch.randint(256, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_stage_1_recomputes_and_stage_2_does_not(folder: Path) -> None:
    first, _ = run(1, folder, [prompt()])
    second, _ = run(2, folder, [prompt()])
    assert first["tokens"] == sum(range(PROMPT, PROMPT + NEW)) == 6112
    assert second["tokens"] == PROMPT + NEW - 1 == 127
    for recomputed, cached in zip(first["logits"], second["logits"], strict=True):
        torch.testing.assert_close(recomputed, cached, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_stage_3_wastes_less_than_a_page_a_request(folder: Path, page_size: int) -> None:
    llm_class = importlib.import_module("minisgl.stage3.llm").LLM
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 9, 23)]
    prompts = [prompt(seed)[: 20 + seed] for seed in range(3)]
    with llm_class(str(folder), dtype="float32", page_size=page_size, num_pages=400) as llm:
        lengths = dict.fromkeys(range(3), 0)
        with closing(llm.stream(prompts, params)) as chunks:
            for chunk in chunks:
                lengths[chunk.index] = (lengths[chunk.index] or len(prompts[chunk.index]) - 1) + 1
                if chunk.finish_reason:
                    lengths[chunk.index] = -1
                used = (llm.allocator.num_pages - llm.allocator.num_free) * page_size
                running = [length for length in lengths.values() if length > 0]
                # a step's chunks arrive one by one: those not seen yet may have one token more
                assert used - sum(running) < page_size * max(len(running), 1) + 3
        assert llm.allocator.num_free == 400


@pytest.mark.parametrize("stage", [1, 2, 3, 4, 5])
def test_closing_a_stream_frees_all_and_another_may_follow(folder: Path, stage: int) -> None:
    llm_class = importlib.import_module(f"minisgl.stage{stage}.llm").LLM
    with llm_class(str(folder), dtype="float32") as llm:
        stream = llm.stream([prompt(1), prompt(2)], SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        with pytest.raises(RuntimeError, match="still open"):
            llm.generate([prompt()], SamplingParams(max_tokens=3))
        stream.close()
        stats = llm.stats()
        assert stats.get("pages_free", 0) + stats.get("pages_cached", 0) == stats.get("pages_total", 0)
        assert len(llm.generate([prompt()], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


@pytest.mark.parametrize("stage", [1, 5])
def test_answers_are_in_the_order_of_the_prompts_and_an_end_is_no_text(folder: Path, stage: int) -> None:
    """The first ends last; the second at a token that ends it, which is in its ids alone, streamed or not."""
    with importlib.import_module(f"minisgl.stage{stage}.llm").LLM(str(folder), dtype="float32") as llm:
        prompts, size = [prompt(1), prompt(2), prompt(3)], SamplingParams(max_tokens=9, ignore_eos=True)
        ids = [completion.token_ids for completion in llm.generate(prompts, size)]
        end = next(at for at in range(9) if ids[1][at] not in ids[1][:at] and at > 1)
        params = [size, replace(size, stop_token_ids=(ids[1][end],)), replace(size, max_tokens=1)]
        found = llm.generate(prompts, params)
        assert [completion.token_ids for completion in found] == [ids[0], ids[1][: end + 1], ids[2][:1]]
        assert [completion.finish_reason for completion in found] == ["length", "stop", "length"]
        assert found[1].text == llm.tokenizer.decode(ids[1][:end])
        texts = ["", "", ""]
        for chunk in llm.stream(prompts, params):
            texts[chunk.index] += chunk.text
        assert texts == [completion.text for completion in found]


def test_the_callers_parameters_stay_as_they_are(folder: Path) -> None:
    """One object for two requests, each of which is given a seed of its own."""
    shared = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    with importlib.import_module("minisgl.stage5.llm").LLM(str(folder), dtype="float32") as llm:
        first, second = llm.generate([prompt(), prompt()], shared)
    assert first.token_ids != second.token_ids
    assert shared == SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    with pytest.raises(FrozenInstanceError):
        shared.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("stage", [3, 5, 7])
def test_close_gives_the_memory_back_while_a_variable_names_the_llm(folder: Path, stage: int) -> None:
    with importlib.import_module(f"minisgl.stage{stage}.llm").LLM(str(folder), dtype="float32") as llm:
        stream = llm.stream([[1, 2]], SamplingParams(max_tokens=9, ignore_eos=True))
        next(stream)  # it stays open, and is held by a variable, too
        engine = {3: "engine", 5: "scheduler.engine", 7: "ranks.scheduler.engine"}[stage]
        pool = weakref.ref(attrgetter(f"{engine}.pool")(llm))
    gc.collect()
    assert pool() is None, f"{llm} or {stream} keeps it"


@pytest.mark.parametrize("stage", range(1, 8))
def test_a_closed_llm_says_so(folder: Path, stage: int) -> None:
    """What it made is gone, and that is not what its caller should be told."""
    few = SamplingParams(max_tokens=3)
    with importlib.import_module(f"minisgl.stage{stage}.llm").LLM(str(folder), dtype="float32") as llm:
        early = llm.stream([[1]], few)
    for late in (lambda: llm.generate([[1]], few), lambda: llm.stream([[1]], few), lambda: next(early)):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            late()
    if stage > 2:  # the first two have nothing to count
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            llm.stats()


@pytest.mark.parametrize("stage", [1, 3, 5])
@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([[]], {}, "empty"),
        ([""], {}, "empty"),
        ([[5, 999999]], {}, "token id 999999"),
        ([[5, -1]], {}, "token id -1"),
        ([[True]], {}, "token id True"),
        ([[1] * 600], {"max_tokens": 1}, "over the limit of 512 .*: shorten the prompt$"),
        ([[1] * 10], {"max_tokens": 503}, "over the limit of 512 .*: shorten the prompt or lower max_tokens$"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(
    folder: Path, stage: int, prompts: list[Any], params: dict[str, Any], words: str
) -> None:
    llm_class = importlib.import_module(f"minisgl.stage{stage}.llm").LLM
    with llm_class(str(folder), dtype="float32") as llm, pytest.raises(ValueError, match=words):
        llm.generate([[1, 2, 3], *prompts], SamplingParams(**{"max_tokens": 5, **params}))


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (5, "not int"),
        (None, "not NoneType"),
        (b"text", "not bytes"),
        ({"text": 1}, "not dict"),
        (iter(["text"]), "not list_iterator"),
        ([1, 2, 3], "not a list with int in it"),
        ((1.5,), "not a tuple with float in it"),
        (["text", None], "not a list with NoneType in it"),
        ([b"text"], "not a list with bytes in it"),
        ([torch.tensor([1, 2])], "not a list with Tensor in it"),
        ([[1, "a"]], "token id 'a' is not an integer"),
    ],
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_other_types_than_prompts_are_named(llm: Any, prompts: Any, words: str, call: str) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(llm, call)(prompts)
    assert len(llm.generate([[1, 2], (3, 4)], SamplingParams(max_tokens=1))) == 2


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (5, "SamplingParams, or a list with one for each prompt, not int"),
        ("greedy", "not str"),
        ({"max_tokens": 3}, "not dict"),
        ([None], "not a list with NoneType in it"),
        ([], "0 sampling_params for 1 prompts"),
    ],
)
def test_other_types_than_sampling_params_are_named(llm: Any, params: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate([[1, 2]], params)


def test_a_request_that_can_never_fit_is_refused(folder: Path) -> None:
    for stage in (3, 4, 5):
        llm_class = importlib.import_module(f"minisgl.stage{stage}.llm").LLM
        with llm_class(str(folder), dtype="float32", num_pages=4) as llm:
            with pytest.raises(ValueError, match="need 5 pages, and the pool has 4"):
                llm.generate([[1] * 40], SamplingParams(max_tokens=26))
            assert len(llm.generate([[1] * 40], SamplingParams(max_tokens=25, ignore_eos=True))[0].token_ids) == 25


def test_settings_are_refused_in_one_line(folder: Path) -> None:
    llm_class = importlib.import_module("minisgl.stage3.llm").LLM
    for options, words in [
        ({"page_size": 0}, "--page-size must be at least 1"),
        ({"dtype": "int8"}, "--dtype must be one of"),
        ({"max_seq_len": 100000}, "more than the 512 positions"),
        ({"paeg_size": 4}, "unknown setting 'paeg_size'"),
        ({"model": 5}, "model must be a str, such as 'smollm2-135m', not int"),
    ]:
        with pytest.raises(ValueError, match=words):
            llm_class(**{"model": str(folder), **options})


@pytest.mark.parametrize("stage", [3, 4])
def test_an_interrupted_step_leaks_no_page(folder: Path, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook."""
    llm_class = importlib.import_module(f"minisgl.stage{stage}.llm").LLM
    with llm_class(str(folder), dtype="float32", num_pages=64) as llm:
        interrupt(llm.engine, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt(), prompt(1)], SamplingParams(max_tokens=20, ignore_eos=True))
        monkeypatch.undo()
        assert llm.stats()["pages_free"] + llm.stats().get("pages_cached", 0) == 64
        assert len(llm.generate([prompt()], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_an_interrupted_step_of_a_scheduler_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm_class = importlib.import_module("minisgl.stage5.llm").LLM
    with llm_class(str(folder), dtype="float32", num_pages=64) as llm:
        interrupt(llm.scheduler.engine, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt()], SamplingParams(max_tokens=20, ignore_eos=True))
        with pytest.raises(RuntimeError, match="make a new one"):
            llm.generate([prompt()], SamplingParams(max_tokens=20, ignore_eos=True))


def interrupt(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fourth forward."""
    steps = iter(range(4))
    run_model = engine.run_model

    def interrupted(batch: Any) -> torch.Tensor:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return run_model(batch)

    monkeypatch.setattr(engine, "run_model", interrupted)
