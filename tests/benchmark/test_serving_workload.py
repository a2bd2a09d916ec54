"""The prompts of `serving` have the tokens that were asked for, whatever the server's tokenizer."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from minisgl.benchmark import http_load, serving
from minisgl.benchmark.http_load import Answer, Server
from minisgl.benchmark.serving import words_for
from minisgl.benchmark.workload import texts

TEMPLATE = 31  # tokens that are not the message's


def tokens(text: str, letters: int) -> int:
    """By a tokenizer that cuts words into pieces of so many letters, the space before them included."""
    return TEMPLATE + sum(-(-len(word) // letters) for word in text.replace(" ", " _").split(" "))


@pytest.mark.parametrize("input_len", [60, 200, 915, 3000])
@pytest.mark.parametrize("letters", [1, 4, 20])
def test_prompts_have_about_the_tokens_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, input_len: int, letters: int
) -> None:
    asked: list[int] = []

    async def chat(server: Server, model: str, messages: Sequence[str], *rest: Any) -> tuple[list[Answer], float]:
        asked.extend(tokens(message, letters) for message in messages)
        return [Answer(0.1, [0.1], 0.2, 2, tokens(message, letters)) for message in messages], 1.0

    monkeypatch.setattr(http_load, "chat", chat)
    words = asyncio.run(words_for(Server("127.0.0.1", 1), "m", input_len))
    lengths = [tokens(message, letters) for message in texts(64, words, "64 0")]
    assert statistics.mean(lengths) == pytest.approx(input_len, rel=0.03, abs=4)
    assert max(asked) <= max(200, 1.2 * input_len), "what is asked beforehand must fit, too"


def test_a_server_without_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def chat(server: Server, model: str, messages: Sequence[str], *rest: Any) -> tuple[list[Answer], float]:
        return [Answer(0.1, [0.1], 0.2, 2, 0) for _ in messages], 1.0

    monkeypatch.setattr(serving.http_load, "chat", chat)
    assert asyncio.run(words_for(Server("127.0.0.1", 1), "m", 915)) == 152
    assert "no usage" in capsys.readouterr().err
