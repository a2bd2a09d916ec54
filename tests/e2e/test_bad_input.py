"""Bad input at the real processes: what only they can judge has its 4xx too, and what is merely odd has its answer.

After each kind: well, answers as before, nothing held. One server with a random model and a tokenizer of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tiny_model import VOCAB, make_tiny_model

from e2e.test_faults import Sound

CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if loops %}{% for i in range(loops) %}x{% endfor %}{% endif %}"
)
FLAGS = ("--threads", "1", "--dtype", "float32", "--num-pages", "200", "--page-size", "16", "--num-tokenizer", "1")
TEXT, CHAT, NATIVE, ENCODE, DECODE = "/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"
SHORT = {"max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sound]:
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    server = Sound(tmp_path_factory.mktemp("t"), "--model", str(model), "--served-model-name", "tiny", *FLAGS)
    try:
        server.wait_ready()
        server.remember()
        yield server
        assert server.end() == 0, server.log
        assert server.remains() == []
    finally:
        server.kill()


def ask(server: Sound, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, timeout=60)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **SHORT, **more}


OUTSIDE = [VOCAB, VOCAB + 1, 2**31 - 1]
REFUSED: dict[str, list[tuple[str, Any]]] = {
    "empty prompts": [
        (TEXT, {"prompt": "", **SHORT}),
        (TEXT, {"prompt": ["a", ""], **SHORT}),
        (TEXT, {"prompt": [[1], []], **SHORT}),
        (NATIVE, {"text": ""}),
        (NATIVE, {"input_ids": [[]]}),
    ],
    "ids that the vocabulary has not": [
        *((TEXT, {"prompt": [1, token_id], **SHORT}) for token_id in OUTSIDE),
        *((TEXT, {"prompt": [[1], [token_id]], "stream": True, **SHORT}) for token_id in OUTSIDE),
        *((NATIVE, {"input_ids": [token_id]}) for token_id in OUTSIDE),
        *((DECODE, {"tokens": [token_id]}) for token_id in OUTSIDE),
        *((TEXT, {"prompt": "a", "stop_token_ids": [token_id], **SHORT}) for token_id in OUTSIDE),
        *((TEXT, {"prompt": "a", "logit_bias": {str(token_id): 1}, **SHORT}) for token_id in OUTSIDE),
    ],
    "more than the context holds": [
        (TEXT, {"prompt": "a" * (CONTEXT + 1), **SHORT}),
        (TEXT, {"prompt": [1] * (CONTEXT - 2), **SHORT}),
        (TEXT, {"prompt": "a", "max_tokens": CONTEXT}),
        (TEXT, {"prompt": "a", "max_tokens": 2**31 - 1}),
        (TEXT, {"prompt": "a" * 10**6, "stream": True, **SHORT}),
        (TEXT, {"prompt": "\U0001f642" * 10**6, **SHORT}),
        (TEXT, {"prompt": [1] * 500_000, **SHORT}),
        (CHAT, user("a" * 10**6)),
        (CHAT, {**user("a" * CONTEXT), "max_tokens": None}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 10_000, **SHORT}),
        (NATIVE, {"text": "a" * 10**6}),
    ],
    "templates that fail": [
        (CHAT, {"messages": [{"role": "tool", "content": "x"}], **SHORT}),
        (CHAT, {**user("a"), "chat_template_kwargs": {"loops": 10**9}}),
        (CHAT, {**user("a"), "chat_template_kwargs": {"loops": "x"}}),
        (CHAT, {**user("a"), "chat_template_kwargs": {"messages": "x"}}),
    ],
    "prompts of which one is bad": [
        (TEXT, {"prompt": ["a", "a" * 1000, "b"], "n": 3, **SHORT}),
        (TEXT, {"prompt": ["a", "a" * 1000, "b"], "n": 3, "stream": True, **SHORT}),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_and_nothing_else_happens(server: Sound, kind: str) -> None:
    for path, body in REFUSED[kind]:
        response = ask(server, path, body)
        assert response.status_code == 400, (path, str(body)[:100], response.text)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 1500, "it repeats its input"
        is_long = kind in ("more than the context holds", "prompts of which one is bad")
        assert (response.json()["error"]["code"] == "context_length_exceeded") is is_long, response.text
        assert server.ask() == server.answer
    server.check()


ODD = [
    "\0",
    "a\0b",
    "\x01\x1b[2J",
    "\ufeffa",
    "\ufffd",
    "\U0010ffff",
    "e\u0301\u0301",
    "👩\u200d👩\u200d👧",
    "<eos>",
    "<bos><pad>",
]
ODD += ["<eos>", "<bos><pad>", "{{ 7 * 7 }}", "{% raw %}", "\n\n\n", " ", "\u2028", "\r\n\r\n", "<|im_end|>"]
ANSWERED: dict[str, list[tuple[str, Any]]] = {
    "odd texts": [
        *((TEXT, {"prompt": text, **SHORT}) for text in ODD),
        *((CHAT, user(text)) for text in ODD),
        *((TEXT, {"prompt": "a", "stop": text, **SHORT}) for text in ODD),
    ],
    "special ids": [(TEXT, {"prompt": [token_id], **SHORT}) for token_id in (0, 256, 257, 258, VOCAB - 1)],
    "the largest that fits": [
        (TEXT, {"prompt": [1] * (CONTEXT - 3), **SHORT}),
        (TEXT, {"prompt": "a", "max_tokens": CONTEXT - 1, "ignore_eos": True}),
        (TEXT, {"prompt": "a", "n": 128, "max_tokens": 1}),
        (TEXT, {"prompt": ["a"] * 128, "max_tokens": 1}),
        (TEXT, {"prompt": "a", "logprobs": 20, "echo": True, **SHORT}),
        (CHAT, {**user("a"), "logprobs": True, "top_logprobs": 20}),
        (TEXT, {"prompt": "a", "stop": ["x" * 1000] * 16, **SHORT}),
        (TEXT, {"prompt": "a", "logit_bias": {str(i): -100 for i in range(VOCAB)}, **SHORT}),
        (TEXT, {"prompt": "a", "stop_token_ids": list(range(128)), **SHORT}),
    ],
    "ends of ranges": [
        (TEXT, {"prompt": "a", "max_tokens": 3, name: value})
        for name, values in {
            "temperature": (0, 1e-300, 1e-6, 100),
            "top_p": (1e-300, 1e-6, 1),
            "min_p": (0, 1e-300, 1),
            "top_k": (-1, 1, 2**31 - 1),
            "seed": (0, 2**63 - 1),
            "presence_penalty": (-2, 2),
            "frequency_penalty": (-2, 2),
            "repetition_penalty": (1e-300, 1e-6, 100),
            "min_tokens": (0, 3),
        }.items()
        for value in values
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ANSWERED)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_it_is_answered_and_nothing_else_happens(server: Sound, kind: str, stream: bool) -> None:
    for path, body in ANSWERED[kind]:
        response = ask(server, path, {**body, "stream": stream})
        assert response.status_code == 200, (path, str(body)[:100], response.text)
        if stream:
            assert response.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in response.text, (str(body)[:100], response.text[-500:])
        assert server.ask() == server.answer
    server.check()


@pytest.mark.slow
@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_a_text_comes_back_from_its_ids(server: Sound, text: str) -> None:
    """But for special tokens, which are not printed."""
    tokens = ask(server, ENCODE, {"prompt": text}).json()["tokens"]
    expected = text
    for special in ("<bos>", "<eos>", "<pad>"):
        expected = expected.replace(special, "")
    assert ask(server, DECODE, {"tokens": tokens}).json() == {"prompt": expected, "text": expected}


@pytest.mark.slow
def test_the_cache_is_flushed_when_nothing_runs(server: Sound) -> None:
    server.ask()
    with httpx.stream(
        "POST", server.url + TEXT, json={"prompt": "a", "max_tokens": 500, "stream": True, "ignore_eos": True}
    ) as one:
        lines = one.iter_lines()
        next(lines)
        assert ask(server, "/flush_cache", b"").status_code in (409, 200)  # it may have ended already
    server.check()
    assert ask(server, "/flush_cache", b"").status_code == 200
    info = server.info()
    assert info["pages_cached"] == 0
    assert info["pages_free"] == info["pages_total"]
    usage = ask(server, TEXT, {"prompt": "The quick brown fox", **SHORT}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
