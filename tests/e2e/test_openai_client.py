"""The `openai` client, unmodified, against a real server with the real model."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from prompts import ORBIT, PLANETS
from server_process import ServerProcess

from minisgl.core.tokenizer import Tokenizer

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is 2+2?"}]


def info(server: ServerProcess) -> dict:
    return httpx.get(f"{server.url}/server_info").json()


def settled(server: ServerProcess) -> dict:
    """Once nothing is open or held: with overlap a request that has ended holds its row for one step more."""
    for _ in range(200):
        now = info(server)
        if now["requests_open"] == now["requests_waiting"] == now["rows_in_use"] == 0:
            return now
        time.sleep(0.1)
    raise AssertionError(f"requests are still there: {now}")


def test_who_has_an_answer_does_not_see_it_run(server: ServerProcess) -> None:
    settled(server)
    body = {"prompt": PLANETS, "max_tokens": 3, "ignore_eos": True}
    for _ in range(3):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
        assert info(server)["requests_running"] == 0
        assert 'minisgl:num_requests_running{model_name="smollm2-135m"} 0.0' in httpx.get(f"{server.url}/metrics").text


def test_chat_streamed_is_chat_whole(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert "4" in (whole.choices[0].message.content or "")
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    usage, streamed = whole.usage, chunks[-1].usage
    assert usage
    assert streamed
    assert chunks[-1].choices == []
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    assert counts == (streamed.prompt_tokens, streamed.completion_tokens, streamed.total_tokens)
    assert sum(counts[:2]) == counts[2]
    assert streamed.prompt_tokens_details
    assert streamed.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 16 * 16, "the pages of its twin"


def test_completions_of_text_and_of_ids_agree(client: openai.OpenAI, model_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(model_folder)
    ids = tokenizer.encode(PLANETS)
    options = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    text = client.completions.create(prompt=PLANETS, **options)
    other = client.completions.create(prompt=[ids, tokenizer.encode(ORBIT)], **options)
    assert [choice.index for choice in other.choices] == [0, 1]
    assert other.choices[0].text == text.choices[0].text
    assert "Jupiter" in text.choices[0].text
    assert text.choices[0].finish_reason == "length"
    assert text.usage
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (len(ids), 8)


def test_seeds_repeat_and_choices_differ(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": ORBIT, "max_tokens": 12, "seed": 5, "n": 3}
    texts = [[choice.text for choice in client.completions.create(**options).choices] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_four_streams_at_once_are_what_each_is_alone(client: openai.OpenAI) -> None:
    prompts = [PLANETS, ORBIT, "One, two, three, four,", "def fibonacci(n):\n"]

    def ask(prompt: str) -> str:
        options = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8}
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, prompts))
    assert together == alone
    assert all(alone)


def test_chat_may_fill_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert answer.choices[0].finish_reason == "stop"


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own(client: openai.OpenAI, stream: bool) -> None:
    options = {"model": MODEL, "stream": stream}
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION, stream=stream)
    for wrong, words in (
        ({"prompt": ""}, "empty"),
        ({"prompt": [50000]}, "50000"),
        ({"prompt": "a", "max_tokens": 10**6}, "1000000"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "stop": ["x", ""]}, "stop"),
        ({"prompt": "a", "logit_bias": {"49152": 1}}, "logit_bias"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.completions.create(**options, **wrong)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_what_it_had(server: ServerProcess, client: openai.OpenAI, stream: bool) -> None:
    body = {"prompt": ORBIT, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            assert info(server)["requests_open"] == 1
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=1.0)
    after = settled(server)
    assert after["pages_free"] + after["pages_cached"] == after["pages_total"]
    assert client.completions.create(model=MODEL, prompt=PLANETS, max_tokens=2).choices[0].finish_reason == "length"
