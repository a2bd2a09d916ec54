"""The tokenizer by itself, and an empty cache, over HTTP: what is asked, answered and refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_ring import FakeRing, reply
from test_api import CHAT, CHAT_PATH, Server, error_of, serving
from test_frontend import settle, silent

from minisgl.stage8 import control
from minisgl.stage8.api import create_app
from minisgl.stage8.messages import Decode, Encode, Flush


def answer(question: Any) -> list:
    if isinstance(question, Encode):
        return [reply(question.uid, "", "stop", tokens=2)]
    return [reply(question.uid, "Hi", "stop", tokens=0)]


def test_tokenize_and_detokenize() -> None:
    async def test() -> None:
        async with serving(FakeRing(answer)) as server:
            found = await server.post("/tokenize", {"prompt": "Hi", "model": "m"})
            assert found.json() == {"tokens": [7, 7], "count": 2, "max_model_len": 512}
            await server.post("/tokenize", {"prompt": "", "add_special_tokens": False})
            found = await server.post("/detokenize", {"tokens": [1, 2]})
            assert found.json() == {"prompt": "Hi", "text": "Hi"}
            assert server.ring.sent == [Encode(0, "Hi"), Encode(1, "", special=False), Decode(2, [1, 2])]
            assert server.service.frontend is not None
            assert server.service.frontend.num_open == 0

    asyncio.run(test())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a" * (control.MAX_TEXT + 1)}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
        ("/detokenize", {"tokens": [[1]]}, "tokens"),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_a_bad_field_is_400_and_named(path: str, body: dict, param: str) -> None:
    async def test() -> None:
        async with serving() as server:
            response = await server.post(path, body)
            assert response.status_code == 400, response.text
            assert error_of(response)["param"].split("[")[0] == param
            assert server.ring.sent == []
            assert (await server.post(path, body | {"model": "other"})).status_code in (400, 404)

    asyncio.run(test())


def test_more_ids_than_the_tokenizer_may_be_given_at_once() -> None:
    async def test() -> None:
        async with serving() as server:
            server.service.max_model_len = control.MAX_TEXT  # else so many values are not read at all
            response = await server.post("/detokenize", {"tokens": [0] * (control.MAX_TEXT + 1)})
            assert response.status_code == 400
            assert error_of(response)["param"] == "tokens"
            assert server.ring.sent == []

    asyncio.run(test())


def test_what_the_tokenizer_refuses_is_400() -> None:
    async def test() -> None:
        refusal = FakeRing(lambda question: [reply(question.uid, tokens=0, error="token id 9 is not from 0 to 8")])
        async with serving(refusal) as server:
            response = await server.post("/detokenize", {"tokens": [9]})
            assert response.status_code == 400
            assert error_of(response)["message"] == "token id 9 is not from 0 to 8"
            server.http._transport.raise_app_exceptions = True  # type: ignore[attr-defined]  # as a trace in the log
            assert (await server.post("/detokenize", {"tokens": [9]})).status_code == 400

    asyncio.run(test())


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_the_cache_is_flushed_or_the_server_is_busy(path: str) -> None:
    async def test() -> None:
        async with serving(FakeRing(answer)) as server:
            response = await server.post(path, b"")
            assert (response.status_code, response.json()) == (200, {"status": "flushed"})
            assert server.ring.sent == [Flush(0)]
            server.ring.answer = lambda question: [reply(question.uid, tokens=0, error="requests wait or run")]
            response = await server.post(path, b"")
            assert response.status_code == 409
            assert (error_of(response)["code"], error_of(response)["message"]) == ("busy", "requests wait or run")
            assert (await server.get(path)).status_code == 405

    asyncio.run(test())


KEYS = {"neither": (None, None), "api": ("sesame", None), "admin": (None, "root"), "both": ("sesame", "root")}
WHO_MAY = {  # keys asked for -> key sent -> may it (ask for an answer, flush the cache)
    "neither": {"": (True, True), "sesame": (True, True), "root": (True, True)},
    "api": {"": (False, False), "sesame": (True, True), "root": (False, False)},
    "admin": {"": (True, False), "sesame": (True, False), "root": (True, True)},
    "both": {"": (False, False), "sesame": (True, False), "root": (False, True)},
}


@pytest.mark.parametrize("asked", KEYS)
def test_who_may_flush(asked: str) -> None:
    async def test() -> None:
        async with serving(FakeRing(lambda question: [reply(question.uid, "a", "stop")])) as plain:
            server = Server(plain.ring, plain.service, None)
            server.http._transport.app = create_app(plain.service, *KEYS[asked])  # type: ignore[attr-defined]
            for key, (may_ask, may_flush) in WHO_MAY[asked].items():
                headers = {"authorization": f"Bearer {key}"} if key else {}
                response = await server.post(CHAT_PATH, CHAT, headers=headers)
                assert (response.status_code == 200) == may_ask, (key, response.text)
                for path in ("/flush_cache", "/reset_prefix_cache"):
                    response = await server.post(path, b"", headers=headers)
                    assert response.status_code == (200 if may_flush else 401), (key, path)
                    assert may_flush or error_of(response)["code"] == "invalid_api_key"
                assert (await server.get("/health", headers=headers)).status_code == 200
            await server.http.aclose()

    asyncio.run(test())


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/flush_cache", {})])
def test_no_engine_is_503_and_a_full_queue_429(path: str, body: dict) -> None:
    async def test() -> None:
        async with serving(FakeRing(silent), max_open=1) as server:
            waiting = asyncio.create_task(server.post(path, body))
            while not server.ring.sent:
                await settle()
            full = await server.post(path, body)
            assert full.status_code == 429
            assert int(full.headers["retry-after"]) >= 1
            server.service.fail("the scheduler died")
            assert (await waiting).status_code == 503
            assert (await server.post(path, json.dumps(body).encode())).status_code == 503

    asyncio.run(test())
