"""A replayed trace: prompts share what the hashes say and the caches find just that, times are scaled, losses told."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_http_load import HEAD, content, framed
from tiny_model import VOCAB, make_tiny_model

from minisgl.benchmark import replay
from minisgl.benchmark.__main__ import main
from minisgl.benchmark.arrivals import Arrival
from minisgl.benchmark.bailian_trace import MOST, synthetic_trace
from minisgl.benchmark.http_load import Answer, Server, figures, send_timed
from minisgl.benchmark.models import CONFIGS
from minisgl.benchmark.simulation import simulate
from minisgl.benchmark.trace_file import parse_trace
from minisgl.benchmark.workload import FIRST_ORDINARY_ID
from minisgl.core.sampling_params import SamplingParams
from minisgl.models.config import ModelConfig
from minisgl.stage5.cost_model import H200
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.llm import LLM

BLOCK = 16
MODEL_VOCAB = 49152
COLUMNS = {
    "chat_id": int,
    "parent_chat_id": int,
    "timestamp": float,
    "input_length": int,
    "output_length": int,
    "type": str,
    "turn": int,
    "hash_ids": list,
}
USAGE = (
    b'{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":16}}}'
)
Row = dict[str, Any]


def arrivals_of(rows: list[Row]) -> list[Arrival]:
    return parse_trace([json.dumps(row) for row in rows], "rows", len(rows))


def shared(a: list[int], b: list[int]) -> int:
    """How many both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def check_shares(rows: list[Row], prompts: list[list[int]]) -> None:
    """Both ways: prompts agree in as many blocks as their hashes do, and in no whole block after that."""
    for (row_a, a), (row_b, b) in itertools.combinations(zip(rows, prompts, strict=True), 2):
        blocks = shared(row_a["hash_ids"], row_b["hash_ids"])
        tokens, least = shared(a, b), min(blocks * BLOCK, len(a), len(b))
        assert least <= tokens < min(least + BLOCK, max(len(a), len(b)) + 1)


def test_the_synthetic_trace_is_the_same_again() -> None:
    rows = synthetic_trace(300)
    assert rows == synthetic_trace(300)
    assert rows[:40] == synthetic_trace(40)
    assert rows != synthetic_trace(300, seed=1)


def test_the_synthetic_trace_has_the_columns_and_its_chats_go_on() -> None:
    """A turn begins with all whole blocks of the one before it and of its answer, and comes later."""
    rows = synthetic_trace(400)
    assert [row["chat_id"] for row in rows] == list(range(400))
    assert sorted(row["timestamp"] for row in rows) == [row["timestamp"] for row in rows]
    for row in rows:
        assert {name: type(value) for name, value in row.items()} == COLUMNS
        assert len(row["hash_ids"]) == -(-row["input_length"] // BLOCK)
        assert 1 <= row["input_length"] <= MOST
        if row["turn"] == 1:
            assert row["parent_chat_id"] == -1
            continue
        before = rows[row["parent_chat_id"]]
        assert before["turn"] == row["turn"] - 1
        assert row["input_length"] > before["input_length"] + before["output_length"]
        assert shared(row["hash_ids"], before["hash_ids"]) == before["input_length"] // BLOCK
    turns = [row["turn"] for row in rows]
    assert 0.2 < sum(turn > 1 for turn in turns) / 400 < 0.5
    assert max(turns) > 2
    assert len({row["hash_ids"][0] for row in rows if row["turn"] == 1}) == 6, "the system prompts"


def test_prompts_share_what_the_hashes_say() -> None:
    rows = synthetic_trace(120)
    prompts = [replay.prompt(arrival, MODEL_VOCAB) for arrival in arrivals_of(rows)]
    assert [len(prompt) for prompt in prompts] == [row["input_length"] for row in rows]
    assert min(map(min, prompts)) >= FIRST_ORDINARY_ID
    assert max(map(max, prompts)) < MODEL_VOCAB * 3 // 4
    check_shares(rows, prompts)


@st.composite
def traces(draw: st.DrawFn) -> list[Row]:
    """Prompts of few different blocks, so that they share all that can be shared."""
    rows = []
    for chat in range(draw(st.integers(2, 6))):
        hashes = draw(st.lists(st.integers(0, 2), max_size=5))
        rest = draw(st.integers(1 - BLOCK if hashes else 1, BLOCK - 1))  # below 0: the last block is not full
        length = len(hashes) * BLOCK + rest  # above 0: what comes after the last block has no hash
        rows.append({"chat_id": chat, "timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": hashes})
    return rows


@settings(max_examples=60, derandomize=True)
@given(rows=traces(), vocab_size=st.sampled_from([VOCAB, MODEL_VOCAB, None]))
def test_any_trace_s_prompts_share_what_the_hashes_say(rows: list[Row], vocab_size: int | None) -> None:
    check_shares(rows, [replay.prompt(arrival, vocab_size) for arrival in arrivals_of(rows)])


def whole_pages(rows: list[Row], page_size: int) -> list[int]:
    """What a prefix cache that forgets nothing finds of each prompt, when each comes after the one before it has
    ended: whole pages that the hashes say an earlier one began with, and never the last token."""
    found = []
    for index, row in enumerate(rows):
        blocks = max((shared(row["hash_ids"], before["hash_ids"]) for before in rows[:index]), default=0)
        found.append(min(blocks * BLOCK, row["input_length"] - 1) // page_size * page_size)
    return found


@pytest.mark.parametrize(("cache", "page_size"), [("radix", 4), ("radix", 16), ("radix", 64), ("naive", 16)])
def test_simulated_hits_are_those_of_the_hashes(cache: str, page_size: int) -> None:
    rows = synthetic_trace(100)
    apart = [{**row, "timestamp": 1000 * index, "output_length": 2} for index, row in enumerate(rows)]
    expected = whole_pages(rows, page_size) if cache == "radix" else [0] * len(rows)
    pages = sum(row["input_length"] for row in rows) // page_size + 500
    config = OverlapConfig(num_pages=pages, page_size=page_size, cache=cache)
    model = ModelConfig.from_dict(CONFIGS["qwen3-0.6b"])
    assert simulate(arrivals_of(apart), config, model, H200).cached.tolist() == expected
    assert sum(whole_pages(rows, page_size)) > 0.3 * sum(row["input_length"] for row in rows)


def test_an_engine_s_hits_are_those_of_the_hashes(tmp_path: Path) -> None:
    """With the tokens that are sent, in a vocabulary of 259."""
    rows = [row for row in synthetic_trace(40) if row["input_length"] < 1000][:14]
    folder = make_tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(str(folder), dtype="float32", threads=1, num_pages=2048) as llm:
        found = [llm.generate([replay.prompt(a, VOCAB)], params)[0].cached_tokens for a in arrivals_of(rows)]
    assert found == whole_pages(rows, 16)
    assert sum(found) > 0


class FakeServer:
    """Answers each request with two tokens, but refuses those whose prompt begins with 0."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        prompt = json.loads(await reader.readexactly(length))["prompt"]
        self.prompts.append(prompt)
        if prompt[0] == 0:
            writer.write(b'HTTP/1.1 400 Bad Request\r\ncontent-length: 9\r\n\r\n"too long"')
        else:
            writer.write(HEAD + framed(content("a")))
            await writer.drain()
            writer.write(framed(content("b"), USAGE, b"[DONE]"))
        writer.close()

    async def measure(self, prompts: list[list[int]], times: list[float]) -> dict[str, float]:
        listening = await asyncio.start_server(self, "127.0.0.1", 0)
        async with listening:
            server = Server("127.0.0.1", listening.sockets[0].getsockname()[1])
            return await replay.measure(server, [{"prompt": prompt} for prompt in prompts], times)


def test_what_fails_is_counted_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    """And each comes at its own time, whatever the order they are given in."""
    fake = FakeServer()
    prompts, times = [[3], [0, 1], [1], [2], [0, 2]], [0.4, 0.3, 0.1, 0.2, 0.0]
    found = asyncio.run(asyncio.wait_for(fake.measure(prompts, times), 30))
    assert fake.prompts == [[0, 2], [1], [2], [0, 1], [3]]
    assert found["failed"] == 2
    assert found["cached"] == 40
    assert found["throughput"] == pytest.approx(6 / found["run"])
    shown = capsys.readouterr().err
    assert "20% 40% 60% 80% 100%" in shown
    assert "2 of 5 requests failed, the first with: no whole stream" in shown
    assert "400 Bad Request" in shown


def test_when_all_fail_there_is_no_number() -> None:
    with pytest.raises(RuntimeError, match="2 of 2 requests failed.*400"):
        asyncio.run(asyncio.wait_for(FakeServer().measure([[0], [0]], [0, 0]), 30))


def test_nobody_listening_is_a_failure_of_each() -> None:
    async def run() -> list[object]:
        listening = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        listening.close()
        ended: list[object] = []
        outcomes, _ = await send_timed(Server("127.0.0.1", port), "/", [{}, {}], [0, 0], ended.append)
        assert ended == outcomes
        return outcomes

    assert all(isinstance(outcome, OSError) for outcome in asyncio.run(run()))


def test_figures_by_hand() -> None:
    """In milliseconds; an answer of one token has no time for each further one."""
    answers = [Answer(0.1, [0.02, 0.04], 0.16, 3, 7), Answer(0.3, [], 0.3, 1, 7), Answer(0.2, [0.03], 0.23, 2, 7)]
    found = figures(answers, 0.5)
    assert found["throughput"] == 12
    assert [found[f"ttft_{q}"] for q in ("p50", "p90", "p99")] == pytest.approx([200, 280, 298])
    assert [found[f"itl_{q}"] for q in ("p50", "p90", "p99")] == pytest.approx([30, 38, 39.8])
    assert found["tpot_p50"] == pytest.approx(30)
    with pytest.raises(ValueError, match="there is no TPOT"):
        figures(answers[1:2], 1.0)


def test_times_are_scaled_and_each_run_has_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a server that exists only in these functions."""
    rows = synthetic_trace(30)
    limit = sorted(row["input_length"] + row["output_length"] for row in rows)[-4]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    seen: list[Any] = []

    async def measure(server: Server, bodies: list[Row], times: list[float]) -> dict[str, float]:
        seen.append((bodies, times))
        return figures([Answer(1.0, [0.5], 1.5, 2, 9)], 2.0) | {"run": 2.0, "cached": 25.0, "failed": 1}

    async def send_all(server: Server, path: str, bodies: list[Row]) -> None:
        seen.append([body["max_tokens"] for body in bodies])

    monkeypatch.setattr(replay, "measure", measure)
    monkeypatch.setattr(replay.http_load, "send_all", send_all)
    monkeypatch.setattr(replay, "model_card", lambda server: {"id": "m", "max_model_len": limit})
    monkeypatch.setattr(replay, "flush_cache", lambda server: seen.append(server.api_key))
    words = ["--replay", str(tmp_path / "trace"), "--requests", "30", "--time-scale", "0.5,0,2", "--out"]
    out = tmp_path / "out"
    assert main(["serving", "--url", "http://x:1", "--admin-key", "a", *words, str(out), "--temperature", "0"]) == 0
    warm_up, *runs = seen
    assert max(warm_up) == replay.WARM_UP
    fitting = [row for row in rows if row["input_length"] + row["output_length"] <= limit]
    assert 0 < len(fitting) == 30 - 3
    for scale, key, (bodies, times) in zip((0.5, 0, 2), runs[::2], runs[1::2], strict=True):
        assert key == "a"
        assert times == pytest.approx([row["timestamp"] * scale for row in fitting])
        assert [len(body["prompt"]) for body in bodies] == [row["input_length"] for row in fitting]
        assert [body["max_tokens"] for body in bodies] == [row["output_length"] for row in fitting]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    first = {record["metric"]: (record["value"], record["unit"]) for record in records[: len(records) // 3]}
    assert first["throughput"] == (1, "tokens/s")
    assert (first["ttft_p99"], first["itl_p50"]) == ((1000, "ms"), (500, "ms"))
    assert (first["cached"], first["failed"], first["left_out"]) == ((25, "%"), (1, "requests"), (3, "requests"))
    assert records[0]["setting"] == "trace=trace temperature=0.0 server=http://x:1 requests=27 time_scale=0.5"
    shown = capsys.readouterr()
    assert f"3 of 30 requests have more than {limit} tokens, prompt and answer, and are left out" in shown.err
    assert shown.out.startswith("trace: trace\n\n")
    assert shown.out.splitlines()[4].split()[:5] == ["its", "own", "0.5", "1", "1,000.0"]


def test_what_was_measured_is_shown_when_the_rest_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = iter([figures([Answer(1.0, [0.5], 1.5, 2, 9)], 2.0) | {"run": 2.0, "cached": 0.0, "failed": 0}])

    async def measure(*_: object) -> dict[str, float]:
        for found in runs:
            return found
        raise RuntimeError("the server died")

    async def send_all(*_: object) -> None:
        """It lives."""

    monkeypatch.setattr(replay, "measure", measure)
    monkeypatch.setattr(replay.http_load, "send_all", send_all)
    monkeypatch.setattr(replay, "model_card", lambda server: {"id": "m"})
    monkeypatch.setattr(replay, "flush_cache", lambda server: None)
    words = ["serving", "--url", "http://x:1", "--replay", str(tmp_path / "none"), "--requests", "2"]
    assert main([*words, "--time-scale", "1,2"]) == 1
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 5
    assert shown.out.startswith(f"trace: synthetic, since there is no {tmp_path / 'none'}\n\n")
    assert shown.err.splitlines()[-1].endswith("error: the server died")


def test_a_missing_file_is_replaced_in_the_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrivals, name = replay.load(tmp_path / "none", 7)
    assert (len(arrivals), name) == (7, "synthetic")
    assert f"there is no {tmp_path / 'none'}: replaying a synthetic trace" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="30 of 30 requests have more than 9 tokens.*--max-seq-len"):
        replay.fit(arrivals_of(synthetic_trace(30)), 9)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--requests", "0"], "error: --requests 0 must be at least 1"),
        (["--time-scale", "1,-1"], "error: --time-scale -1 must be at least 0"),
        (["--time-scale", "nan"], "error: --time-scale nan must be at least 0"),
        (["--caches", "radix,best"], "error: each of --caches must be radix or naive, not 'best'"),
        (["--caches", "radix", "--url", "http://x:1"], "leave it out, or --url"),
    ],
)
def test_a_wrong_setting_is_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serving", "--replay", "none", *words])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert error in last


@pytest.mark.parametrize(
    ("limits", "allowed"), [((1024, 4096), 2024), ((1024, 1500), 1500), ((1024, -1), 2024), ((-1, -1), None)]
)
def test_as_many_connections_as_requests(
    limits: tuple[int, int], allowed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the system lets us."""
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(replay.resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(replay.resource, "getrlimit", lambda what: limits)
    monkeypatch.setattr(replay.resource, "setrlimit", lambda what, both: said.append(both))
    replay._allow_connections(1000)
    assert said == ([] if allowed is None else [(allowed, limits[1])])


@pytest.mark.slow
def test_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two servers, one after the other; requests far enough apart that the second always finds the first."""
    rows = [row for row in synthetic_trace(40) if row["input_length"] < 1000][:3]
    rows = [{**row, "timestamp": 1.5 * index, "output_length": 3} for index, row in enumerate(rows)]
    rows.append({**rows[-1], "output_length": 5000})
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    words = ["--replay", str(tmp_path / "trace"), "--caches", "naive,radix", "--time-scale", "1,0.5"]
    flags = ["--model", str(model), "--dtype", "float32", "--threads", "1", "--num-pages", "1024"]
    assert main(["serving", *words, *flags, "--out", str(tmp_path / "out")]) == 0
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    runs = [records[start : start + len(records) // 4] for start in range(0, len(records), len(records) // 4)]
    shares = 100 * sum(whole_pages(rows[:3], 16)) / sum(row["input_length"] for row in rows[:3])
    assert shares > 0
    for run, (cache, scale) in zip(runs, itertools.product(("naive", "radix"), (1.0, 0.5)), strict=True):
        assert f" cache={cache} requests=3 time_scale={scale} " in run[0]["setting"]
        found = {record["metric"]: record["value"] for record in run}
        assert found["cached"] == pytest.approx(shares if cache == "radix" else 0, abs=0.001)
        assert (found["failed"], found["left_out"]) == (0, 1)
        assert found["throughput"] == pytest.approx(9 / found["run"], rel=0.01)
        assert 0 < found["ttft_p50"] <= found["ttft_p99"]
    assert len(capsys.readouterr().out.splitlines()) == 8
