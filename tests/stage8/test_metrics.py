"""The metrics: what is counted when, by their definitions, and that Prometheus' own parser reads them."""

from __future__ import annotations

import asyncio
import time

import pytest
from fake_ring import FakeRing, hello, reply
from prometheus_client.parser import text_string_to_metric_families
from test_api import CHAT, CHAT_PATH, serving
from test_frontend import listening, requests, settle, silent, texts

from minisgl.stage8.ask import EngineGone, RequestFailed, RequestRefused
from minisgl.stage8.codec import encode
from minisgl.stage8.messages import Heartbeat
from minisgl.stage8.metrics import Metrics
from minisgl.stage8.prometheus import prometheus_text

STATS = {
    "requests_running": 3,
    "requests_waiting": 4,
    "pages_total": 64,
    "pages_in_use": 16,
    "queried_tokens": 100,
    "hit_tokens": 30,
    "retractions": 2,
}


def samples(text: bytes | str) -> dict[str, float]:
    """By name, without the prefix, with all labels but model_name."""
    text = text if isinstance(text, str) else text.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            assert name.startswith("minisgl:")
            assert labels.pop("model_name") == "m"
            found[name.removeprefix("minisgl:") + "".join(f"|{v}" for v in labels.values())] = value
    return found


def test_every_name_of_the_contract_is_there() -> None:
    found = samples(prometheus_text("m", Metrics(), STATS))
    assert (
        found.items()
        >= {
            "num_requests_running": 3,
            "num_requests_waiting": 4,
            "kv_cache_usage_perc": 0.25,
            "prefix_cache_queries_total": 100,
            "prefix_cache_hits_total": 30,
            "num_preemptions_total": 2,
            "prompt_tokens_total": 0,
            "generation_tokens_total": 0,
            "time_to_first_token_seconds_count": 0,
            "inter_token_latency_seconds_count": 0,
            "e2e_request_latency_seconds_count": 0,
            "request_queue_time_seconds_count": 0,
            "request_success_total|stop": 0,
            "request_success_total|length": 0,
            "request_success_total|abort": 0,
        }.items()
    )


def test_times_are_those_of_the_definitions() -> None:
    metrics = Metrics()
    metrics.begin(1, 10.0)
    metrics.begin(2, 10.0)
    metrics.take([reply(1), reply(2, "a")], 10.5)  # 1: a part of a character, and no content yet
    metrics.take([reply(1, "é"), reply(2)], 11.0)
    metrics.take([reply(1, "b"), reply(2, "c", "length")], 11.25)
    metrics.take([reply(1, "d", "stop")], 12.25)
    metrics.take([reply(1, "late"), reply(7, "unknown")], 20.0)
    found = samples(prometheus_text("m", metrics, {}))
    assert found["time_to_first_token_seconds_sum"] == 0.5 + 1.0
    assert found["time_to_first_token_seconds_bucket|0.25"] == 0
    assert found["time_to_first_token_seconds_bucket|0.5"] == 1, "a bound belongs to its bucket"
    assert found["time_to_first_token_seconds_bucket|+Inf"] == 2
    assert found["inter_token_latency_seconds_sum"] == 0.25 + 0.75 + 1.0
    assert found["inter_token_latency_seconds_count"] == 3
    assert found["e2e_request_latency_seconds_sum"] == 1.25 + 2.25
    assert found["generation_tokens_total"] == 7
    assert found["prompt_tokens_total"] == 10, "a prompt counts once, and what is late not at all"
    assert found["request_success_total|stop"] == found["request_success_total|length"] == 1


def test_every_end_is_counted_once_and_a_refusal_is_none() -> None:
    async def test() -> None:
        ring = FakeRing(silent)
        async with listening(ring) as frontend:
            with frontend.ask(requests(frontend, 2)):  # 0, 1: the client leaves when 0 has ended
                ring.give(reply(0, "a", "stop"))
                await settle()
            ring.give(reply(1, finish="abort", tokens=0))
            for uid, error, is_bug in ((2, RequestRefused, False), (3, RequestFailed, True)):
                ask = frontend.ask(requests(frontend))
                ring.give(reply(uid, tokens=0, error="no", is_bug=is_bug))
                with pytest.raises(error):
                    await texts(ask)
            waiting = asyncio.create_task(texts(frontend.ask(requests(frontend))))
            await settle()
            frontend.fail_all("the engine is gone")
            with pytest.raises(EngineGone):
                await waiting
            assert frontend.metrics.ended == {"stop": 1, "length": 0, "abort": 1, "error": 2}
            assert frontend.metrics._open == {}, "nothing outlives its request"

    asyncio.run(test())


def test_what_the_server_says_of_real_calls() -> None:
    async def test() -> None:
        ring = FakeRing(hello)
        async with serving(ring) as server:
            before = time.monotonic()
            for stream in (False, True):
                assert (await server.post(CHAT_PATH, CHAT | {"stream": stream, "n": 2})).status_code == 200
            elapsed = time.monotonic() - before
            ring.put(encode(Heartbeat(0, STATS, [0.25, 0.5])))
            await settle()
            response = await server.get("/metrics")
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/plain; version=")
            found = samples(response.text)
            assert found["request_success_total|stop"] == 4
            assert found["generation_tokens_total"] == 12
            assert found["e2e_request_latency_seconds_count"] == found["time_to_first_token_seconds_count"] == 4
            assert 0 < found["e2e_request_latency_seconds_sum"] < 4 * elapsed
            assert found["request_queue_time_seconds_sum"] == 0.75
            assert found["num_requests_running"] == 3
            info = (await server.get("/server_info")).json()
            assert info.items() >= STATS.items()

    asyncio.run(test())


def test_malformed_messages_of_both_processes_are_one_counter() -> None:
    async def test() -> None:
        async with serving(FakeRing(hello)) as server:
            server.ring.put(b"no message")
            server.ring.beat(malformed_messages=2)
            await settle()
            info = (await server.get("/server_info")).json()
            assert {name: info[name] for name in info if "malformed" in name} == {"malformed_messages": 3}

    asyncio.run(test())


def test_hazard_25_no_label_is_a_clients_choice() -> None:
    """The text is as long after requests of every kind as before them."""

    async def test() -> None:
        async with serving(FakeRing(hello)) as server:
            names = samples((await server.get("/metrics")).text).keys()
            await server.post(CHAT_PATH, CHAT | {"user": "u", "metadata": {"k": "v"}})
            await server.post(CHAT_PATH, CHAT | {"model": "org/m"})
            await server.post(CHAT_PATH, CHAT | {"model": "other"})
            await server.get("/no/such/path")
            assert samples((await server.get("/metrics")).text).keys() == names

    asyncio.run(test())
