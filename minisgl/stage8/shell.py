"""`--shell`: a conversation in the terminal, streamed. Knows an LLM and a terminal, and nothing of processes."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from minisgl.core.cli import fail
from minisgl.core.errors import EngineFailure
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage8.llm import LLM
from minisgl.stage8.server_config import ServerConfig

PROMPT = ">>> "
HELP = """/reset   forget the conversation
/stats   pages and requests, as the scheduler counts them
/help    these lines
/exit    leave, as Ctrl-D does
Ctrl-C   stop the answer"""


def run_shell(config: ServerConfig, params: SamplingParams) -> int:
    """Returns the exit status: 2 for what the user can mend, 1 when a process died, 130 for Ctrl-C while it starts."""
    logging.basicConfig(format="[%(message)s]", level=config.log_level.upper())
    try:
        with closing(LLM(**asdict(config))) as llm:
            Shell(llm, params).run()
    except ValueError as error:
        fail(str(error))
    except EngineFailure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


class Shell:
    """One conversation. history: the messages so far, as the chat template takes them."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        """Raises ValueError when the model has no chat template."""
        if not llm.tokenizer.has_chat_template:
            raise ValueError(f"{llm.config.model} has no chat template, which --shell needs: use --prompt")
        self.llm, self.params = llm, params
        self.history: list[dict[str, str]] = []
        self._last_answer = ""

    def run(self) -> None:
        """Until /exit or Ctrl-D. Raises EngineFailure when a process died."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (arrow keys: `input` uses it once it is there)
        print(f"{self.llm.config.model} · /help lists the commands")
        while True:
            try:
                line = input(PROMPT).strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")
                continue
            except UnicodeDecodeError as error:
                print(f"error: what you typed is not {error.encoding}, which this terminal is said to be")
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def _command(self, line: str) -> None:
        if line == "/reset":
            self.history.clear()
            print("(the conversation is forgotten)")
        elif line == "/stats":
            facts = [self._last_answer, *(f"{name.replace('_', ' ')} {value}" for name, value in self._stats())]
            print(" · ".join(filter(None, facts)))
        elif line == "/help":
            print(HELP)
        else:
            print(f"there is no command {line.split()[0]:.40}: /help lists them")

    def _stats(self) -> Iterator[tuple[str, int]]:
        yield "messages", len(self.history)
        yield from self.llm.stats().items()

    def _turn(self, line: str) -> None:
        """A message and its answer. One that was stopped stays in the history as far as it went."""
        self.history.append({"role": "user", "content": line})
        text = ""
        try:
            prompt_ids = self.llm.tokenizer.encode_chat(self.history)
            text = self._stream(prompt_ids, self._fitted(len(prompt_ids)))
        except ValueError as error:
            print(f"error: {error}")
        if text:
            self.history.append({"role": "assistant", "content": text})
        else:
            self.history.pop()

    def _fitted(self, prompt_len: int) -> SamplingParams:
        left = self.llm.processes.info.max_total_tokens - prompt_len
        if left < 1:
            raise ValueError("the conversation is as long as the model's context: /reset begins a new one")
        return replace(self.params, max_tokens=min(left, self.params.max_tokens))

    def _stream(self, prompt_ids: list[int], params: SamplingParams) -> str:
        start = time.perf_counter()
        text, tokens, reason = "", 0, None
        with interrupts() as interrupted, closing(self.llm.stream([prompt_ids], params)) as chunks:
            for chunk in chunks:
                print(chunk.text, end="", flush=True)
                text += chunk.text
                tokens += len(chunk.token_ids)
                reason = chunk.finish_reason
                if interrupted:
                    break
        print(" (stopped)" if reason is None else "")
        if reason == "length":
            print(f"(cut after {params.max_tokens} tokens: --max-tokens allows more, as far as the context goes)")
        rate = tokens / (time.perf_counter() - start)
        self._last_answer = f"last answer {tokens} tokens at {rate:.1f} tokens/s"
        return text


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """The SIGINTs that come meanwhile. As exceptions they could come between a message's receipt and its handling,
    and what was lost there would be waited for in vain; so only the second is one."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
