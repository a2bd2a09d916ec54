"""Stop strings, logprobs, echo, penalties: the `openai` client against a real server with the real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from prompts import EMOJI, PLANETS
from server_process import ServerProcess
from transformers import AutoModelForCausalLM

from minisgl.core.tokenizer import Tokenizer

from .test_openai_client import MODEL, QUESTION, settled

TOLERANCE = 2e-3  # float32, and another order of sums
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


@pytest.fixture(scope="module")
def transformer(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


def logprobs_of(transformer: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids) - 1, vocab]: of what comes after each."""
    with torch.inference_mode():
        return transformer(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, str | None, int]:
    """Text, finish reason and completion tokens of a streamed completion."""
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    return text, chunks[-2].choices[0].finish_reason, chunks[-1].usage.completion_tokens


@pytest.fixture(scope="module")
def whole(client: openai.OpenAI) -> str:
    return client.completions.create(prompt=PLANETS, **GREEDY).choices[0].text


@pytest.mark.parametrize(("inside", "length"), [(0, 3), (4, 2), (5, 9)])
def test_stop_strings_cut_exactly_streamed_or_not(
    client: openai.OpenAI, tokenizer: Tokenizer, whole: str, inside: int, length: int
) -> None:
    """The stop string is some part of the answer, wherever its tokens begin and end."""
    stop = whole[inside : inside + length]
    answer = client.completions.create(prompt=PLANETS, stop=["never said", stop], **GREEDY)
    expected = whole[: whole.index(stop)]
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    ids = tokenizer.encode(PLANETS + whole)[len(tokenizer.encode(PLANETS)) :]
    assert answer.usage
    counted = answer.usage.completion_tokens
    assert stop in tokenizer.decode(ids[:counted])
    assert stop not in tokenizer.decode(ids[: counted - 1])
    assert streamed(client, prompt=PLANETS, stop=stop, **GREEDY) == (expected, "stop", counted)


def test_a_stop_string_frees_what_the_request_held(server: ServerProcess, client: openai.OpenAI) -> None:
    options = {"model": MODEL, "temperature": 0, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(prompt=PLANETS, stop=",", **options)
    assert answer.choices[0].finish_reason == "stop"
    after = settled(server)
    assert after["pages_free"] + after["pages_cached"] == after["pages_total"]


def test_echo_and_logprobs_are_those_of_transformers(
    client: openai.OpenAI, tokenizer: Tokenizer, transformer: Any
) -> None:
    for prompt in (PLANETS, EMOJI):
        answer = client.completions.create(prompt=prompt, echo=True, logprobs=3, **GREEDY)
        plain = client.completions.create(prompt=prompt, **GREEDY)
        choice, usage = answer.choices[0], answer.usage
        assert choice.text == prompt + plain.choices[0].text
        assert choice.logprobs
        assert usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(tokenizer.encode(prompt)), 8)
        found, offsets = choice.logprobs.token_logprobs, choice.logprobs.text_offset
        ids = tokenizer.encode(choice.text)
        assert found
        assert offsets
        assert found[0] is None
        assert len(found) == len(ids) == len(offsets), "the answer's text has the tokens it was made of"
        expected = logprobs_of(transformer, ids)
        torch.testing.assert_close(
            torch.tensor(found[1:]), expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=TOLERANCE, rtol=0
        )
        best = expected.topk(3).values
        for row, top in zip(best, choice.logprobs.top_logprobs[1:], strict=True):  # type: ignore[index]
            torch.testing.assert_close(torch.tensor(sorted(top.values())[-3:]).flip(0), row, atol=TOLERANCE, rtol=0)
        for offset, token, following in zip(offsets, choice.logprobs.tokens or [], [*offsets[1:], None], strict=True):
            if not token.startswith("bytes:"):
                assert choice.text[offset:following] == token


def test_a_loglikelihood_as_lm_eval_asks_for_it(client: openai.OpenAI, tokenizer: Tokenizer, transformer: Any) -> None:
    """Several prompts of ids, one token generated and dropped, greedy or not by the likeliest of each."""
    contexts, goals = [PLANETS, "One, two, three,"], [" Jupiter", " banana"]
    rows = [tokenizer.encode(context + goal) for context, goal in zip(contexts, goals, strict=True)]
    lengths = [len(tokenizer.encode(context)) for context in contexts]
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = client.completions.create(model=MODEL, prompt=rows, **asked)  # type: ignore[call-overload]
    for choice, row, length, greedy in zip(answer.choices, rows, lengths, [True, False], strict=True):
        found = choice.logprobs.token_logprobs[length:-1]
        expected = logprobs_of(transformer, row).gather(1, torch.tensor(row[1:])[:, None])[length - 1 :, 0]
        torch.testing.assert_close(torch.tensor(found), expected, atol=TOLERANCE, rtol=0)
        tops = choice.logprobs.top_logprobs[length:-1]
        assert all(one == max(top.values()) for one, top in zip(found, tops, strict=True)) == greedy
    alone = client.completions.create(model=MODEL, prompt=PLANETS, max_tokens=0, echo=True, logprobs=1)
    assert alone.choices[0].text == PLANETS
    assert alone.choices[0].logprobs
    assert len(alone.choices[0].logprobs.tokens or []) == lengths[0]
    assert alone.usage
    assert alone.usage.completion_tokens == 0


def test_chat_logprobs_streamed_are_those_of_the_whole(client: openai.OpenAI) -> None:
    options = {"messages": QUESTION, "logprobs": True, "top_logprobs": 2, "n": 2, "stop": ["is"], **GREEDY}
    whole = client.chat.completions.create(**options)
    found: list[list[Any]] = [[], []]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            found[choice.index] += (choice.logprobs.content or []) if choice.logprobs else []
    assert whole.usage
    assert [choice.message.content for choice in whole.choices] == texts
    assert sum(map(len, found)) == whole.usage.completion_tokens, "one entry a token"
    for choice, entries in zip(whole.choices, found, strict=True):
        assert choice.logprobs
        said = choice.logprobs.content or []
        assert [entry.token for entry in said] == [entry.token for entry in entries]
        assert all(len(entry.top_logprobs) == 2 for entry in said)
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in said), "greedy"
        assert bytes(byte for entry in said for byte in entry.bytes or []).decode().startswith(choice.message.content)


def test_fields_that_change_the_choice_of_tokens(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    plain = client.completions.create(prompt="a b a b a b a b", **GREEDY)
    assert plain.choices[0].finish_reason == "length"
    [b] = tokenizer.encode(" b")
    for changed in (
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 3.0}},
        {"logit_bias": {str(b): -100, str(tokenizer.encode(" a")[0]): -100}},
    ):
        answer = client.completions.create(prompt="a b a b a b a b", **GREEDY, **changed)  # type: ignore[call-overload]
        assert answer.choices[0].text != plain.choices[0].text
    first = tokenizer.encode(plain.choices[0].text)[0]
    ended = client.completions.create(prompt="a b a b a b a b", extra_body={"stop_token_ids": [first]}, **GREEDY)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    late = {"stop": [" a", " b"], "extra_body": {"min_tokens": 5}}
    answer = client.completions.create(prompt="a b a b a b a b", **late, **GREEDY)  # type: ignore[call-overload]
    assert answer.usage
    assert answer.usage.completion_tokens >= 6
    assert plain.choices[0].text.startswith(answer.choices[0].text)


def test_usage_as_it_grows(server: ServerProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PLANETS, "max_tokens": 5, "temperature": 0, "stream": True, "stream_options": options}
    text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text
    *events, done, _ = text.split("\n\n")
    assert done == "data: [DONE]"
    counts = [httpx.Response(200, text=event.removeprefix("data: ")).json()["usage"] for event in events]
    assert [count["completion_tokens"] for count in counts] == [1, 2, 3, 4, 5, 5, 5]
