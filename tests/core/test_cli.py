"""The command line's text: answers on standard output in the order of the prompts, the rest on standard error."""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_model

from minisgl.core.cli import main
from minisgl.core.sampling_params import SamplingParams

PROMPTS = ("a dog sat", "what is it?", "def f(x):")
FACTS = {1: [], 3: ["pages total", "pages free"], 5: ["pages total", "pages free", "pages cached", "hit tokens"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    template = "{% for m in messages %}({{ m.role }}) {{ m.content }}{% endfor %}"
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return folder


@pytest.fixture(autouse=True)
def same_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command sets up the logging of its process, which here is that of other tests too."""
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    logger = logging.getLogger("minisgl")
    level = logger.level
    yield
    logger.setLevel(level)


def llm_class(stage: int) -> Any:
    return importlib.import_module(f"minisgl.stage{stage}.llm").LLM


def answers(stage: int, folder: Path, prompts: list[str]) -> list[str]:
    with llm_class(stage)(str(folder), dtype="float32") as llm:
        params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
        return [completion.text for completion in llm.generate(prompts, params)]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stage", FACTS)
def test_text_and_one_line_of_statistics(
    stage: int, chat: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt is encoded raw, or with --chat as a user's turn."""
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    more = ["--max-tokens", "6", "--temperature", "0", "--ignore-eos", "--dtype", "float32", *["--chat"][:chat]]
    assert main(llm_class(stage), ["--model", str(folder), *prompts, *more]) == 0
    shown = capsys.readouterr()
    asked = [f"(user) {prompt}" if chat else prompt for prompt in PROMPTS]
    assert shown.out == "".join(f"{text}\n" for text in answers(stage, folder, asked))
    facts = shown.err.splitlines()[-1]
    assert re.match(r"\[18 tokens · \d+\.\d tokens/s · TTFT \d+ ms", facts)
    assert all(re.search(rf" · {name} \d+", facts) for name in FACTS[stage]), facts


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give at least one --prompt"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens must be an integer from 1"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be"),
        (["--prompt", "a", "--page-size", "0"], "--page-size must be at least 1, not 0"),
        (["--prompt", "a", "--page-sise", "4"], "unrecognized arguments: --page-sise 4"),
        (["--prompt", "a", "--output", "xml"], "invalid choice: 'xml'"),
        (["--prompt", "a", "--tp", "2"], "unrecognized arguments: --tp 2"),  # of a stage to come
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(llm_class(3), flags)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out, len(shown.err.splitlines())) == (2, "", 1)
    assert words in shown.err
