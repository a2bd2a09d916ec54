"""A terminal that lacks characters: every command shows what it can, and none ends with a codec error."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.core import cli
from minisgl.core.outputs import Completion
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage1.llm import LLM

TEXT = "é 中 🙂 ■"


@contextlib.contextmanager
def ascii_terminal() -> Iterator[Callable[[], str]]:
    """While it is open it is standard output. Gives what it has shown."""
    received = io.BytesIO()
    terminal = io.TextIOWrapper(received, encoding="ascii", write_through=True)
    with contextlib.redirect_stdout(terminal):
        yield lambda: received.getvalue().decode()
    terminal.detach()  # it would close `received` when it goes


def main_of(module: str) -> Callable[[Sequence[str]], int]:
    return importlib.import_module(module).main


@pytest.mark.parametrize(
    "main",
    [
        lambda argv: cli.main(LLM, argv),
        main_of("minisgl.stage8.serve"),
        main_of("minisgl.learn.commands"),
        main_of("minisgl.benchmark.__main__"),
        main_of("minisgl.viz.__main__"),
        main_of("minisgl.kernel.selftest"),
    ],
    ids=["stage1", "stage8", "learn", "benchmark", "viz", "selftest"],
)
def test_every_command_shows_what_it_can(main: Callable[[Sequence[str]], int]) -> None:
    with ascii_terminal() as shown:
        with pytest.raises(SystemExit) as ended:
            main(["--help"])
        print(TEXT)
    assert ended.value.code == 0
    assert shown().endswith("\\xe9 \\u4e2d \\U0001f642 \\u25a0\n")


def test_progress_keeps_its_signs_apart() -> None:
    with ascii_terminal() as shown:
        assert main_of("minisgl.learn.commands")(["progress"]) == 0
    assert "\\u25a0 done   \\u2717 failed   \\u25aa written" in shown()


def test_json_stays_json_with_the_same_text() -> None:
    llm: Any = SimpleNamespace(generate=lambda *_: [Completion(TEXT, [1], "stop", 1, 0)])
    with ascii_terminal() as shown:
        cli.show_json(llm, [[1]], SamplingParams())
    assert json.loads(shown())["text"] == TEXT


def test_json_is_readable_where_it_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    llm: Any = SimpleNamespace(generate=lambda *_: [Completion(TEXT, [1], "stop", 1, 0)])
    cli.show_json(llm, [[1]], SamplingParams())
    assert TEXT in capsys.readouterr().out
