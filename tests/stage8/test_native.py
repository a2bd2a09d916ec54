"""SGLang's native endpoint over a fake ring: what is asked of the engine, and how answers look."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_ring import FakeRing, reply
from test_api import error_of, events, serving

from minisgl.stage8.messages import Tokenize

PATH = "/generate"
META = {"prompt_tokens": 5, "cached_tokens": 2}


def test_a_whole_answer() -> None:
    async def test() -> None:
        async with serving() as server:
            answer = (await server.post(PATH, {"text": "Hi"})).json()
            assert (
                answer.pop("meta_info").items()
                >= {"finish_reason": {"type": "stop"}, "completion_tokens": 3, **META}.items()
            )
            assert answer == {"text": "Hello", "output_ids": [7, 7, 7]}
            [request] = server.ring.requests
            assert (request.text, request.params.max_tokens, request.params.temperature) == ("Hi", 128, 1.0)

    asyncio.run(test())


def test_a_stream_has_the_whole_text_so_far() -> None:
    def answer(request: Tokenize) -> list:
        parts = [("Hel", None, 1), ("", None, 1), ("lo\n\u2028", None, 2), ("", "length", 1)]
        return [reply(request.uid, text, reason, tokens) for text, reason, tokens in parts]

    async def test() -> None:
        async with serving(FakeRing(answer)) as server:
            found = events(await server.post(PATH, {"text": "Hi", "stream": True}))
        metas = [event.pop("meta_info") for event in found]
        assert [meta["completion_tokens"] for meta in metas] == [1, 4, 5]
        assert [meta["finish_reason"] for meta in metas] == [None, None, {"type": "length", "length": 5}]
        assert len({meta["id"] for meta in metas}) == 1
        assert found == [
            {"index": 0, "text": "Hel"},
            {"index": 0, "text": "Hello\n\u2028"},
            {"index": 0, "text": "Hello\n\u2028", "output_ids": [7] * 5},
        ]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"text": "a"}, "a"),
        ({"text": ["a"]}, ["a"]),
        ({"text": ["a", "b"]}, ["a", "b"]),
        ({"input_ids": [1, 2]}, "[1, 2]"),
        ({"input_ids": [[1, 2]]}, ["[1, 2]"]),
        ({"text": "a", "n": 2}, ["a", "a"]),
        ({"text": "a", "sampling_params": {"n": 1}}, "a"),
        ({"text": ["a", "b"], "sampling_params": {"n": 2}}, ["a", "a", "b", "b"]),
    ],
    ids=str,
)
def test_one_prompt_has_one_answer_and_a_list_has_a_list(body: dict, texts: Any) -> None:
    async def test() -> None:
        ring = FakeRing(lambda request: [reply(request.uid, str(request.text or request.token_ids), "stop")])
        async with serving(ring) as server:
            answer = (await server.post(PATH, body)).json()
            assert (answer["text"] if isinstance(answer, dict) else [one["text"] for one in answer]) == texts
            found = events(await server.post(PATH, body | {"stream": True}))
            several = [texts] if isinstance(texts, str) else texts
            assert {event["index"]: event["text"] for event in found} == dict(enumerate(several))

    asyncio.run(test())


FLAT = {"max_tokens": 9, "min_tokens": 2, "seed": 3, "temperature": 0, "top_k": 4, "stop": ["x"], "ignore_eos": True}


@pytest.mark.parametrize(
    "body",
    [
        FLAT,
        {"sampling_params": FLAT},
        {"sampling_params": {**FLAT, "max_tokens": None, "max_new_tokens": 9}},
        {**FLAT, "max_tokens": 100, "sampling_params": {"max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 3}},
    ],
)
def test_parameters_flat_or_nested_with_either_name(body: dict) -> None:
    async def test() -> None:
        async with serving() as server:
            assert (await server.post(PATH, {"text": "Hi", **body})).status_code == 200
            [request] = server.ring.requests
            params = request.params
            assert (params.max_tokens, params.min_tokens, params.seed, params.temperature) == (9, 2, 3, 0)
            assert (params.top_k, params.ignore_eos, request.stop) == (4, True, ["x"])

    asyncio.run(test())


def test_what_sglangs_benchmark_sends() -> None:
    async def test() -> None:
        async with serving() as server:
            body = {
                "text": "Hi",
                "sampling_params": {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True},
                "stream": True,
                "lora_path": None,
                "return_logprob": False,
                "return_routed_experts": False,
                "logprob_start_len": -1,
            }
            assert events(await server.post(PATH, body))[-1]["meta_info"]["completion_tokens"] == 3

    asyncio.run(test())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": None, "input_ids": None}, "text"),
        ({"text": []}, "text"),
        ({"text": 1}, "text"),
        ({"text": ["a", 1]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [2**31]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [[[1]]]}, "input_ids"),
        ({"sampling_params": [{}]}, "sampling_params"),
        ({"sampling_params": "x"}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": "1"}}, "max_new_tokens"),
        ({"sampling_params": {"min_new_tokens": -1}}, "min_new_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"sampling_seed": -1}}, "sampling_seed"),
        ({"sampling_params": {"regex": "a+"}}, "regex"),
        ({"sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"sampling_params": {"skip_special_tokens": False}}, "skip_special_tokens"),
        ({"image_data": "http://x/y.png"}, "image_data"),
        ({"lora_path": "a"}, "lora_path"),
        ({"return_logprob": True}, "return_logprob"),
        ({"echo": True}, "echo"),
        ({"text": ["a"] * 129}, "prompt"),
    ],
    ids=lambda value: f"{value!r:.50}",
)
def test_a_bad_field_is_400_and_has_the_name_it_was_given(body: dict, param: str) -> None:
    async def test() -> None:
        async with serving() as server:
            asked = body if {"text", "input_ids"} & body.keys() or not body else {"text": "Hi", **body}
            for stream in (False, True):
                response = await server.post(PATH, asked | {"stream": stream})
                assert response.status_code == 400, response.text
                assert error_of(response)["param"].split("[")[0] == param
                assert param in error_of(response)["message"]
            assert server.ring.sent == []
            assert (await server.post(PATH, {"text": "a", "model": "other"})).status_code == 404

    asyncio.run(test())
