"""The HTTP contract, against an engine that answers at once: status codes, bodies, streams, and who lets go of what."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fake_ring import FakeRing, hello, reply
from test_frontend import listening, settle, silent

from minisgl.stage8.api import MAX_BODY, create_app
from minisgl.stage8.errors import MAX_MESSAGE
from minisgl.stage8.messages import Tokenize
from minisgl.stage8.service import Service

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "m", "prompt": "Hi"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


class Server:
    """The app over a fake ring. `post` gives a finished response, `open` plays a client that can go away."""

    def __init__(self, ring: FakeRing, service: Service, key: str | None) -> None:
        self.ring, self.service = ring, service
        self.app = create_app(service, key)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://test"
        )

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body)
        return await self.http.post(path, content=content, timeout=20, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.http.get(path, **options)


@asynccontextmanager
async def serving(ring: FakeRing | None = None, key: str | None = None, max_open: int = 200) -> AsyncIterator[Server]:
    ring = ring or FakeRing()
    async with listening(ring, max_open=max_open) as frontend:
        ring.beat(pages_free=9)
        await settle()
        service = Service(("m", "org/m"), "org/m", {}, frontend, 512, "ready")
        server = Server(ring, service, key)
        async with server.http:
            yield server


def events(response: httpx.Response) -> list[dict]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *found, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= MAX_MESSAGE
    return error


# Answers


def test_a_whole_chat_answer() -> None:
    async def test() -> None:
        async with serving() as server:
            answer = (await server.post(CHAT_PATH, CHAT)).json()
        assert answer["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        assert answer["model"] == "m"

    asyncio.run(test())


def test_a_chat_stream_in_full() -> None:
    async def test() -> None:
        async with serving() as server:
            found = events(await server.post(CHAT_PATH, CHAT | {"stream": True}))
        assert [event["choices"][0]["delta"] for event in found] == [
            {"role": "assistant", "content": ""},
            {"content": "Hel"},
            {"content": "lo"},
            {},
        ]
        assert [event["choices"][0]["finish_reason"] for event in found] == [None, None, None, "stop"]
        assert len({(event["id"], event["created"], event["model"], event["object"]) for event in found}) == 1
        assert all("usage" not in event for event in found)

    asyncio.run(test())


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
def test_stream_usage_only_when_asked(path: str, body: dict) -> None:
    async def test() -> None:
        async with serving() as server:
            asked = body | {"stream": True, "stream_options": {"include_usage": True}}
            *found, last = events(await server.post(path, asked))
            whole = (await server.post(path, body)).json()
        assert all(event["usage"] is None for event in found)
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_numbered_prompt_by_prompt(stream: bool) -> None:
    def answer(request: Tokenize) -> list:
        return [reply(request.uid, f"{request.text}{request.params.seed}", "length")]

    async def test() -> None:
        async with serving(FakeRing(answer)) as server:
            body = {"prompt": ["a", "b"], "n": 2, "seed": 8, "stream": stream}
            response = await server.post(
                TEXT_PATH, body | ({"stream_options": {"include_usage": True}} if stream else {})
            )
        if stream:
            found = events(response)
            usage = found[-1]["usage"]
            texts = {c["index"]: c["text"] for e in found for c in e["choices"] if c["text"]}
        else:
            usage = response.json()["usage"]
            texts = {c["index"]: c["text"] for c in response.json()["choices"]}
        assert texts == {0: "a8", 1: "a9", 2: "b8", 3: "b9"}
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 4), "a prompt counts once"

    asyncio.run(test())


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("a", [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, [1, 2])]),
        ([[1, 2], [3]], [(None, [1, 2]), (None, [3])]),
    ],
)
def test_the_four_kinds_of_prompt(prompt: Any, asked: list) -> None:
    async def test() -> None:
        async with serving() as server:
            assert (await server.post(TEXT_PATH, {"prompt": prompt})).status_code == 200
            assert [(request.text, request.token_ids) for request in server.ring.requests] == asked
            assert {request.params.max_tokens for request in server.ring.requests} == {16}

    asyncio.run(test())


def test_what_a_chat_asks_of_the_engine() -> None:
    async def test() -> None:
        async with serving() as server:
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            messages = [{"role": "developer", "content": "Be kind"}, {"role": "user", "content": parts, "name": "Bo"}]
            await server.post(CHAT_PATH, {"messages": messages})
            await server.post(
                CHAT_PATH,
                CHAT
                | {"max_tokens": 9, "max_completion_tokens": 3, "temperature": 0, "top_k": 4, "min_p": 0.1}
                | {"top_p": 0.5, "seed": 1, "ignore_eos": True, "user": "x", "store": False, "whatever": [1]},
            )
            first, second = server.ring.requests
        assert first.chat == [
            {"role": "system", "content": "Be kind"},
            {"role": "user", "content": "a\nb", "name": "Bo"},
        ]
        assert first.fill_context
        assert first.params.temperature == 1.0, "OpenAI's default"
        assert not second.fill_context
        params = second.params
        assert (params.max_tokens, params.temperature, params.top_k, params.min_p) == (3, 0, 4, 0.1)
        assert (params.top_p, params.seed, params.ignore_eos) == (0.5, 1, True)

    asyncio.run(test())


def test_null_is_the_same_as_absent() -> None:
    names = "temperature top_p top_k min_p seed n max_tokens max_completion_tokens stop stream stream_options"
    more = "tools tool_choice functions response_format logprobs top_logprobs logit_bias presence_penalty audio echo"
    more += " stop_token_ids min_tokens frequency_penalty repetition_penalty chat_template_kwargs chat_template"

    async def test() -> None:
        async with serving() as server:
            body = CHAT | dict.fromkeys(f"{names} {more}".split())
            assert (await server.post(CHAT_PATH, body)).status_code == 200

    asyncio.run(test())


# Refusals

BAD = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 10**400}, "seed"),
    ({"n": 0}, "n"),
    ({"n": -3}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": False}, "n"),
    ({"stream": 1}, "stream"),
    ({"stream": "yes"}, "stream"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    ({"model": 7}, "model"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": 1}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 1001}, "stop"),
    ({"stop": ["x" * 10**6]}, "stop"),
    ({"stop_token_ids": 1}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 10**30}, "min_tokens"),
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"presence_penalty": True}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias[...]"),
    ({"logit_bias": {"1": None}}, "logit_bias[...]"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"the": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 500: 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": "3"}, "logprobs"),
    ({"logprobs": 1.5}, "logprobs"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"guided_choice": ["yes", "no"]}, "guided_choice"),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ({"regex": "a+"}, "regex"),
    ({"json_schema": "{}"}, "json_schema"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"documents": [{"text": "a"}]}, "documents"),
]
BAD_CHAT = [
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"echo": True}, "echo"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs[...]"),
    ({"chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs[...]"),
    ({"chat_template_kwargs": dict.fromkeys(map(str, range(65)))}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "a"}] * 10_001}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "x" * 10**6, "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "y" * 10**6}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
]
BAD_TEXT = [
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"echo": 1}, "echo"),
    ({"echo": "yes"}, "echo"),
    ({"echo": False, "max_tokens": 0}, "max_tokens"),
    ({"echo": True, "max_completion_tokens": -1}, "max_completion_tokens"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
]
BAD_PROMPTS = [None, 1, True, [], {}, [1, "a"], [[1], 2], [[1], "a"], [-1], [2**31], [1.5], [True], [[True]], [[[1]]]]


@pytest.mark.parametrize("stream", [{}, {"stream": True}], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [(CHAT_PATH, CHAT | bad, param) for bad, param in BAD + BAD_CHAT]
    + [(TEXT_PATH, TEXT | bad, param) for bad, param in BAD + BAD_TEXT]
    + [(TEXT_PATH, {"prompt": bad}, "prompt") for bad in BAD_PROMPTS]
    + [(TEXT_PATH, {"prompt": "a" * 10**6, "n": 17}, "n")]
    + [(TEXT_PATH, {"prompt": ["a"] * 129}, "prompt"), (TEXT_PATH, {"prompt": ["a"] * 64, "n": 3}, "n")],
    ids=lambda value: f"{value!r:.60}",
)
def test_a_bad_field_is_400_and_named(path: str, body: dict, param: str, stream: dict) -> None:
    async def test() -> None:
        async with serving() as server:
            response = await server.post(path, stream | body)
            assert response.status_code == 400, response.text
            found = error_of(response)
            assert found["param"].split("[")[0] == param.split("[")[0] if path == TEXT_PATH else found["param"] == param
            assert found["type"] == "invalid_request_error"
            assert server.ring.sent == []

    asyncio.run(test())


def test_stream_options_without_a_stream_are_refused() -> None:
    async def test() -> None:
        async with serving() as server:
            response = await server.post(CHAT_PATH, CHAT | {"stream_options": {"include_usage": True}})
            assert response.status_code == 400
            assert error_of(response)["param"] == "stream_options"

    asyncio.run(test())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"prompt": "' + b"a" * 10**6,
    ],
    ids=range(15),
)
def test_a_body_that_is_no_request_is_400(body: bytes) -> None:
    async def test() -> None:
        async with serving() as server:
            response = await server.post(TEXT_PATH, body)
            assert response.status_code == 400, response.text
            error_of(response)
            assert server.ring.sent == []

    asyncio.run(test())


@pytest.mark.parametrize("body", [CHAT, CHAT | {"stream": True}])
def test_what_the_engine_refuses_is_400_before_any_stream(body: dict) -> None:
    async def test() -> None:
        ring = FakeRing(lambda request: [reply(request.uid, tokens=0, error="too long", param="messages")])
        async with serving(ring) as server:
            response = await server.post(CHAT_PATH, body)
            assert response.status_code == 400
            assert error_of(response)["message"] == "too long"
            assert error_of(response)["param"] == "messages"

    asyncio.run(test())


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT_PATH, CHAT, "messages"),
        (TEXT_PATH, TEXT, "prompt"),
        (TEXT_PATH, {"prompt": [[1], [2, 3]]}, "prompt"),
        ("/generate", {"text": ["a"]}, "text"),
        ("/generate", {"input_ids": [1]}, "input_ids"),
    ],
)
def test_what_is_too_long_is_told_by_its_code(path: str, body: dict, field: str) -> None:
    def answer(request: Tokenize) -> list:
        return [reply(request.uid, tokens=0, error="9 tokens", param=request.field, code="context_length_exceeded")]

    async def test() -> None:
        async with serving(FakeRing(answer)) as server:
            found = error_of(await server.post(path, body))
            assert (found["param"], found["code"]) == (field, "context_length_exceeded")

    asyncio.run(test())


def test_a_bad_prompt_among_good_ones_is_400_before_the_stream() -> None:
    def answer(request: Tokenize) -> list:
        bad = reply(request.uid, tokens=0, error="empty", param="prompt")
        return [reply(request.uid, "a")] if request.text else [bad]

    async def test() -> None:
        async with serving(FakeRing(answer)) as server:
            response = await server.post(TEXT_PATH, {"prompt": ["a", ""], "stream": True})
            assert response.status_code == 400
            assert error_of(response)["message"] == "empty"
            assert server.ring.aborted == [0], "the good one has nobody to talk to"

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_after_the_beginning(stream: bool) -> None:
    async def test() -> None:
        ring = FakeRing(lambda request: [reply(request.uid, "Hel")])
        async with serving(ring) as server:
            pending = asyncio.create_task(server.post(CHAT_PATH, CHAT | {"stream": stream}))
            while not ring.sent:
                await settle()
            await settle()
            server.service.fail("the scheduler process died")
            response = await pending
            if stream:
                *_, last = events(response)
                assert last["error"]["message"] == "the scheduler process died"
                assert last["error"]["type"] == "server_error"
            else:
                assert response.status_code == 503
                assert error_of(response)["message"] == "the scheduler process died"
            assert (await server.post(CHAT_PATH, CHAT)).status_code == 503
            assert (await server.get("/health")).status_code == 503
            assert (await server.get("/ready")).status_code == 503

    asyncio.run(test())


def test_our_own_bug_is_500_and_says_nothing_of_it() -> None:
    def broken(request: Tokenize) -> list:
        raise ZeroDivisionError("secret")

    async def test() -> None:
        async with serving(FakeRing(broken)) as server:
            response = await server.post(CHAT_PATH, CHAT)
            assert response.status_code == 500
            assert error_of(response)["type"] == "server_error"
            assert "secret" not in response.text
            server.ring.answer = hello
            assert (await server.post(CHAT_PATH, CHAT)).status_code == 200
            assert server.service.frontend is not None
            assert server.service.frontend.num_open == 0

    asyncio.run(test())


# Who is let in, and where


def test_models() -> None:
    async def test() -> None:
        async with serving() as server:
            [card] = (await server.get("/v1/models")).json()["data"]
            assert (card["id"], card["root"], card["max_model_len"], card["object"]) == ("m", "org/m", 512, "model")
            assert (await server.get("/v1/models/m")).json() == card
            assert (await server.get("/v1/models/org/m")).json() == card | {"id": "org/m"}
            for response in (
                await server.get("/v1/models/other"),
                await server.post(CHAT_PATH, CHAT | {"model": "other", "stream": True}),
                await server.post(TEXT_PATH, TEXT | {"model": "o" * 10**6}),
            ):
                assert response.status_code == 404
                assert error_of(response)["code"] == "model_not_found"
            answer = (await server.post(CHAT_PATH, CHAT | {"model": "org/m"})).json()
            assert answer["model"] == "org/m"

    asyncio.run(test())


def test_unknown_routes_and_methods() -> None:
    async def test() -> None:
        async with serving() as server:
            for path in ("/v1/nothing", "/", "/v1/chat/completions/", "/docs"):
                missing = await server.get(path)
                assert missing.status_code == 404
                error_of(missing)
            wrong = await server.get(CHAT_PATH)
            assert wrong.status_code == 405
            assert wrong.headers["allow"] == "POST"
            error_of(wrong)

    asyncio.run(test())


def test_keys() -> None:
    async def test() -> None:
        async with serving(key="sesame") as server:
            for header in ({}, {"authorization": "Bearer open"}, {"authorization": "sesame"}, {"x-api-key": "sesame"}):
                for path in (CHAT_PATH, "/nothing"):
                    response = await server.post(path, CHAT, headers=header)
                    assert response.status_code == 401
                    assert error_of(response)["code"] == "invalid_api_key"
                assert (await server.get("/server_info", headers=header)).status_code == 401
            assert (await server.post(CHAT_PATH, CHAT, headers={"authorization": "Bearer sesame"})).status_code == 200
            assert (await server.get("/health")).status_code == 200
            assert (await server.get("/ready")).status_code == 200

    asyncio.run(test())


def test_bodies_are_bounded() -> None:
    async def pieces(sent: list[int]) -> AsyncIterator[bytes]:
        for _ in range(100):
            sent.append(1)
            yield b" " * 2**20

    async def test() -> None:
        async with serving() as server:
            sent: list[int] = []
            for response in (
                await server.post(TEXT_PATH, b" " * (MAX_BODY + 1)),
                await server.http.post(TEXT_PATH, content=pieces(sent)),
            ):
                assert response.status_code == 413
                error_of(response)

    asyncio.run(test())


def test_more_than_may_wait_is_429() -> None:
    async def test() -> None:
        async with serving(FakeRing(silent), max_open=2) as server:
            waiting = asyncio.create_task(server.post(CHAT_PATH, CHAT | {"n": 2}))
            while len(server.ring.sent) < 2:
                await settle()
            response = await server.post(CHAT_PATH, CHAT | {"stream": True})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert error_of(response)["type"] == "rate_limit_error"
            server.ring.give(reply(0, "a", "stop"), reply(1, "b", "stop"))
            assert (await waiting).status_code == 200

    asyncio.run(test())


def test_starting_and_draining_take_nothing() -> None:
    async def test() -> None:
        async with serving() as server:
            service, frontend = server.service, server.service.frontend
            service.status, service.frontend = "starting", None
            for path in ("/ready", "/health"):
                assert (await server.get(path)).status_code == 503
            assert (await server.post(CHAT_PATH, CHAT)).status_code == 503
            service.status, service.frontend = "draining", frontend
            assert (await server.get("/ready")).status_code == 503
            assert (await server.get("/health")).status_code == 200
            response = await server.post(CHAT_PATH, CHAT)
            assert response.status_code == 503
            assert error_of(response)["type"] == "server_error"

    asyncio.run(test())


def test_server_info_has_live_counters() -> None:
    async def test() -> None:
        async with serving() as server:
            info = (await server.get("/server_info")).json()
            assert (info["pages_free"], info["requests_open"], info["model"]) == (9, 0, "m")

    asyncio.run(test())


# Clients that go away


class Client:
    """Plays an HTTP client at the level of ASGI."""

    def __init__(self, app: Any, body: dict, whole: bool = True) -> None:
        self.received: list[dict] = []
        self._messages: asyncio.Queue[dict] = asyncio.Queue()
        data = json.dumps(body).encode()
        self._messages.put_nowait({"type": "http.request", "body": data, "more_body": not whole})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": CHAT_PATH,
            "raw_path": CHAT_PATH.encode(),
            "query_string": b"",
            "headers": [],
            "client": ("c", 1),
            "server": ("s", 1),
        }
        self.done = asyncio.create_task(app(scope, self._messages.get, self._send))

    async def _send(self, message: dict) -> None:
        self.received.append(message)

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})


def test_a_client_that_leaves_within_its_body_asks_nothing() -> None:
    async def test() -> None:
        async with serving() as server:
            client = Client(server.app, CHAT, whole=False)
            client.leave()
            await asyncio.wait_for(client.done, 20)
            assert server.ring.sent == []

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_takes_its_requests_with_it(stream: bool, begun: bool) -> None:
    async def test() -> None:
        async with serving(FakeRing(silent)) as server:
            client = Client(server.app, CHAT | {"stream": stream, "n": 2})
            while len(server.ring.sent) < 2:
                await settle()
            if begun:
                server.ring.give(reply(0, "a"), reply(1, "b"))
                await settle()
            assert bool(client.received) == (stream and begun), "nothing is sent before the engine has begun"
            client.leave()
            await asyncio.wait_for(client.done, 20)
            assert server.ring.aborted == [0, 1]
            assert server.service.frontend is not None
            assert server.service.frontend.num_open == 0

    asyncio.run(test())


def test_each_reply_is_sent_as_it_comes() -> None:
    async def test() -> None:
        async with serving(FakeRing(silent)) as server:
            client = Client(server.app, CHAT | {"stream": True})
            while not server.ring.sent:
                await settle()
            for count, text in enumerate("abc"):
                server.ring.give(reply(0, text))
                await settle()
                bodies = [m["body"] for m in client.received if m["type"] == "http.response.body"]
                assert len(bodies) == count + 1
                assert f'"content":"{text}"'.encode() in bodies[-1]
            server.ring.give(reply(0, "", "stop"))
            await asyncio.wait_for(client.done, 20)
            assert client.received[-1]["more_body"] is False
            assert server.ring.aborted == []

    asyncio.run(test())


def test_the_api_process_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, minisgl.stage8.api, minisgl.stage8.serve;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
