"""The conversation in the terminal: what each line does, and that Ctrl-C and Ctrl-D do what they say."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_model import make_tiny_model

from minisgl.core.outputs import Chunk
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage8.shell import Shell

SECONDS = 90.0


class FakeLLM:
    """Answers with the last message in capitals, a letter a chunk."""

    def __init__(self, template: bool = True, context: int = 100) -> None:
        self.config = SimpleNamespace(model="fake")
        self.tokenizer = SimpleNamespace(has_chat_template=template, encode_chat=self.encode_chat)
        self.processes = SimpleNamespace(info=SimpleNamespace(max_total_tokens=context))
        self.asked: list[tuple[list[dict], SamplingParams]] = []
        self.closed = 0
        self.interrupt_at: int | None = None

    def encode_chat(self, messages: list[dict]) -> list[int]:
        if messages[-1]["content"] == "bad":
            raise ValueError("no such thing")
        self.messages = [dict(message) for message in messages]
        return [0] * sum(len(message["content"]) for message in messages)

    def stream(self, prompts: list[list[int]], params: SamplingParams) -> Iterator[Chunk]:
        self.asked.append((self.messages, params))
        text = self.messages[-1]["content"].upper()
        try:
            for place, letter in enumerate(text):
                if place == self.interrupt_at:
                    os.kill(os.getpid(), signal.SIGINT)
                yield Chunk(0, letter, [1], "length" if place == len(text) - 1 else None)
        finally:
            self.closed += 1

    def stats(self) -> dict[str, int]:
        return {"pages_free": 7}


def talk(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM, *lines: str | BaseException | type[BaseException]) -> Shell:
    script = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        line = next(script)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    shell = Shell(llm, SamplingParams(max_tokens=50, temperature=0.5))  # type: ignore[arg-type]
    shell.run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return shell


def test_the_history_goes_along_until_it_is_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM()
    shell = talk(monkeypatch, llm, "one", "", "  two  ", "/reset", "three")
    said = [[message["content"] for message in messages] for messages, _ in llm.asked]
    assert said == [["one"], ["one", "ONE", "two"], ["three"]]
    assert [message["role"] for message in llm.asked[1][0]] == ["user", "assistant", "user"]
    assert [message["content"] for message in shell.history] == ["three", "THREE"]
    assert all(params.temperature == 0.5 for _, params in llm.asked)
    assert "TWO" in capsys.readouterr().out


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    talk(monkeypatch, llm, "/stats", "/help", "/what is this", KeyboardInterrupt, "hi", "/stats", "/exit", "unseen")
    out = capsys.readouterr().out
    assert "pages free 7" in out
    assert all(command in out for command in ("/reset", "/stats", "/exit", "Ctrl-C"))
    assert "there is no command /what" in out
    assert "Ctrl-D or /exit leaves" in out
    assert re.search(r"last answer 2 tokens at [\d.]+ tokens/s · messages 2", out)
    assert len(llm.asked) == 1


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM()
    llm.interrupt_at = 3
    shell = talk(monkeypatch, llm, "abcdefgh")
    assert [message["content"] for message in shell.history] == ["abcdefgh", "ABCD"], "the chunk at hand is shown"
    assert "ABCD (stopped)" in capsys.readouterr().out
    assert llm.closed == 1


def test_what_cannot_be_asked_is_said_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM(context=12)
    shell = talk(monkeypatch, llm, "bad", "12345", "6789", "/reset", "hello")
    out = capsys.readouterr().out
    assert "error: no such thing" in out
    assert "error: the conversation is as long as the model's context: /reset begins a new one" in out
    assert [params.max_tokens for _, params in llm.asked] == [7, 7], "no more than the context leaves"
    assert "cut after 7 tokens" in out
    assert len(shell.history) == 2


def test_what_cannot_be_read_does_not_end_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM()
    shell = talk(monkeypatch, llm, "one", UnicodeDecodeError("ascii", b"\xc3", 0, 1, "not in range"), "two")
    assert "error: what you typed is not ascii" in capsys.readouterr().out
    assert len(shell.history) == 4


def test_a_model_without_a_chat_template_cannot_chat() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Shell(FakeLLM(template=False), SamplingParams())  # type: ignore[arg-type]


class Terminal:
    """`python -m minisgl.stage8 --shell` behind a pseudo-terminal."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.descriptor, there = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl.stage8", "--shell", "--model", str(folder), *flags],
            stdin=there,
            stdout=there,
            stderr=there,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"},
            preexec_fn=lambda: take_terminal(there),
        )
        os.close(there)

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, pattern: str) -> str:
        """What came up to there. Raises AssertionError with all that is left when it does not come."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.seen!r}"
            if select.select([self.descriptor], [], [], 0.5)[0]:
                try:
                    self.seen += os.read(self.descriptor, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    raise AssertionError(f"it ended, with {self.seen!r}") from None
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.descriptor)


def take_terminal(descriptor: int) -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_shell_in_a_terminal(tmp_path: Path) -> None:
    """From its start to Ctrl-D: Ctrl-C ends an answer that would go on for minutes, and the next one is answered."""
    folder = make_tiny_model(tmp_path / "tiny", max_position_embeddings=30000)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    flags: list[Any] = ["--max-tokens", "29000", "--ignore-eos", "--num-pages", "2000", "--dtype", "float32"]
    terminal = Terminal(folder, *flags)
    try:
        terminal.wait_for("/help lists the commands")
        terminal.wait_for(">>> ")
        terminal.type("/what\n")
        terminal.wait_for("there is no command /what")
        terminal.wait_for(">>> ")
        for _ in range(2):
            terminal.type("Hello\n")
            terminal.wait_for(r"Hello\r\n[\s\S]{200}")
            terminal.type("\x03")
            terminal.wait_for(r"\(stopped\)")
            terminal.wait_for(">>> ")
        terminal.type("/stats\n")
        assert "requests running 0" in terminal.wait_for(r"requests waiting 0[^\n]*\n")
        terminal.wait_for(">>> ")
        terminal.type("\x03")
        terminal.wait_for("Ctrl-D or /exit leaves")
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        assert terminal.process.wait(SECONDS) == 0
    finally:
        terminal.close()
