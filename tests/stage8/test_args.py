"""The server's command line, without starting anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import minisgl
from minisgl.stage8.args import num_processes, parse
from minisgl.stage8.server_config import ServerConfig
from minisgl.where import ROLES, main


def test_no_flags_are_the_defaults() -> None:
    config, args = parse([], "minisgl")
    assert config == ServerConfig()
    assert args.prompt is None


def test_flags_become_settings() -> None:
    words = "--host 0.0.0.0 --port 0 --tp 2 --num-tokenizer 3 --api-key k --served-model-name m --max-queued-requests 5"
    config, _ = parse(words.split(), "minisgl")
    assert (config.host, config.port, config.tp, config.num_tokenizer) == ("0.0.0.0", 0, 2, 3)
    assert (config.api_key, config.served_model_name, config.max_queued_requests) == ("k", "m", 5)
    assert num_processes(config) == 7


def test_a_shell_has_one_running_request_and_is_quiet() -> None:
    config, args = parse(["--shell", "--temperature", "0.5"], "minisgl")
    assert args.shell
    assert (config.max_running_requests, config.log_level) == (1, "warning")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--port 70000", "--port"),
        ("--port -1", "--port"),
        ("--port many", "--port"),
        ("--tp 0", "--tp"),
        ("--num-tokenizer -1", "--num-tokenizer"),
        ("--num-tokenizer 500", "--num-tokenizer must be at most 64"),
        ("--api-key=", "--api-key is empty"),
        ("--admin-key=", "--admin-key is empty"),
        ("--drain-timeout -1", "--drain-timeout"),
        ("--max-queued-requests 0", "--max-queued-requests"),
        ("--log-level loud", "--log-level"),
        ("--model-source github", "--model-source"),
        ("--attn flash", "--attn must be auto, torch, triton, fi"),
        ("--attn fi,torch", "--attn"),
        ("--attn fi,triton,fi", "--attn"),
        ("--attn=", "--attn"),
        ("--dtype int4", "--dtype"),
        ("--memory-ratio 2", "--memory-ratio"),
        ("--temperature -1", "temperature"),
        ("--shell --temperature nan", "temperature"),
        ("--shell --prompt a", "--prompt"),
        ("--top-p nan", "top_p"),
        ("--por 1919", "--por"),
        ("surplus", "surplus"),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(words.split(), "minisgl")
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert named in err


def test_help_says_how_many_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--help"], "minisgl")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"the default is {num_processes(ServerConfig())}," in text
    assert f"is {num_processes(ServerConfig(tp=2, num_tokenizer=2))}." in text


def test_every_role_has_a_file() -> None:
    root = Path(minisgl.__file__).parent.parent
    assert [file for _, file, _ in ROLES if not (root / file).is_file()] == []


def test_where_finds_roles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["radix"]) == 0
    assert "minisgl/stage4/radix_cache.py" in capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr().out.count("\n") == len(ROLES)
    assert main(["no such role"]) == 1
    assert "no such role" in capsys.readouterr().err


def test_where_knows_the_glossarys_words_and_more(capsys: pytest.CaptureFixture[str]) -> None:
    glossary = (Path(minisgl.__file__).parents[1] / "chapters" / "glossary.md").read_text("utf-8")
    cells = re.findall(r"^\| (?!here)([^|]+) \| [^|]*[^\x00-\x7f|][^|]* \|", glossary, re.MULTILINE)
    terms = [re.sub(r"[`()]", "", term).strip() for cell in cells for term in cell.split(",")]
    assert len(terms) > 50
    more = [
        "retractions",
        "heartbeat",
        "preempt",
        "lock step",
        "stop string",
        "top_p",
        "disconnect",
        "mixed batches",
        "retracted",
        "Perfetto",
        "replay",
    ]
    assert [term for term in [*terms, *more] if main(term.split()) != 0] == []


def test_where_is_not_misled_by_parts_of_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["min-p"]) == 0
    assert "minisgl/sampling/filters.py" in capsys.readouterr().out
    assert main(["lock"]) == 0
    assert "simulated" not in capsys.readouterr().out, "a clock is no lock"
