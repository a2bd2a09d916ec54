"""The command line every stage has: settings to flags, prompts to text or JSON. Knows no stage.

Standard output carries answers and nothing else; what is said about the run goes to standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
import types
import typing
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NoReturn

from minisgl.core.config import Config, ConfigT, flag, make_config
from minisgl.core.errors import EngineFailure
from minisgl.core.outputs import Chunk, Completion
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.terminal import json_line, show_any_text

if typing.TYPE_CHECKING:
    from minisgl.core.llm import BaseLLM

SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 is greedy"),
    ("top_k", int, "sample among the k most likely; -1 for all"),
    ("top_p", float, "sample among the most likely that make up this probability"),
    ("min_p", float, "drop tokens below this share of the most likely one's probability"),
    ("seed", int, "makes the answer repeatable"),
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of forty flags would hide it."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (--help lists what is allowed)", file=sys.stderr)
        raise SystemExit(2)


def main(llm_class: type[BaseLLM], argv: Sequence[str] | None = None) -> int:
    """`python -m minisgl.stageN`. Returns the exit status."""
    show_any_text()
    prog = f"python -m {llm_class.__module__.removesuffix('.llm')}"
    parser = Parser(prog=prog, allow_abbrev=False)
    add_config_arguments(parser, llm_class.config_class)
    add_prompt_arguments(parser)
    add_mine_argument(parser)
    args = parser.parse_args(argv)
    try:
        options = config_options(llm_class.config_class, args)
        make_config(llm_class.config_class, options)
        params = sampling_params(args)
        if not args.prompt:
            raise ValueError("give at least one --prompt")
    except ValueError as error:
        parser.error(str(error))
    return with_mine(args.mine, lambda: run_prompts(llm_class, options, args, params))


def add_config_arguments(parser: argparse.ArgumentParser, config_class: type[Config]) -> None:
    """One flag a setting, with its help, type and choices, under the heading of the class that has it. `--seed` is
    the requests' (see SAMPLING_FLAGS)."""
    hints = typing.get_type_hints(config_class)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        kind = _plain_type(hints[field.name])
        if field.name == "seed":
            continue
        owner = next(c for c in config_class.__mro__ if field.name in vars(c).get("__annotations__", ()))
        assert issubclass(owner, Config)
        heading = owner.group
        group = groups[heading] = groups.get(heading) or parser.add_argument_group(heading)
        help_text = _with_default(field.metadata["help"], field.default)
        common: dict[str, Any] = {"default": field.default, "help": help_text, "dest": field.name}
        if kind is bool:
            group.add_argument(flag(field.name), action="store_true", **common)
        else:
            choices, metavar = field.metadata["choices"], field.metadata["metavar"]
            group.add_argument(flag(field.name), type=kind, choices=choices, metavar=metavar, **common)


def _with_default(help_text: str, default: Any) -> str:
    """Where there is none to show, the text says what happens without the flag."""
    return help_text if default is None or default is False else f"{help_text} (default: %(default)s)"


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompt", action="append", help="text to go on from; may be given several times")
    group.add_argument("--chat", action="store_true", help="wrap each prompt in the model's chat template")
    group.add_argument("--max-tokens", type=int, default=128, help=_with_default("longest answer", 128))
    group.add_argument("--output", choices=("text", "json"), default="text", help="json: one object a line")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    defaults = SamplingParams()
    for name, kind, help_text in SAMPLING_FLAGS:
        default = getattr(defaults, name)
        group.add_argument(flag(name), type=kind, default=default, help=_with_default(help_text, default))


def add_mine_argument(parser: argparse.ArgumentParser) -> None:
    help_text = "run with your own code of these chapters, such as 3 or 3,4 or all; the fused kernels are off then"
    parser.add_argument("--mine", metavar="N", help=help_text)


def config_options(config_class: type[ConfigT], args: argparse.Namespace) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(config_class) if field.name != "seed"]
    options = {name: getattr(args, name) for name in names}
    if getattr(args, "mine", None) is not None and "disable_fusion" in options:
        options["disable_fusion"] = True  # they would go past the methods of the layers
        options["attn"] = "torch" if options["attn"] == "auto" else options["attn"]
    return options


def with_mine(mine: str | None, work: Callable[[], int]) -> int:
    """Work with the learner's code of the chapters in `mine`, if any, and say how often it was called."""
    if mine is None:
        return work()
    from minisgl.learn.serving import run_with  # only for those who learn

    try:
        return run_with(mine, work)
    except ValueError as error:
        fail(str(error))


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name in args]  # those that are flags
    return SamplingParams(**{name: getattr(args, name) for name in names})


def run_prompts(
    llm_class: type[BaseLLM], options: dict[str, Any], args: argparse.Namespace, params: SamplingParams
) -> int:
    """Answer the prompts. Returns the exit status: 2 for what the user can mend, 1 when the engine failed, 130 for
    Ctrl-C."""
    logging.basicConfig(format="[%(message)s]", level=logging.WARNING)
    logging.getLogger("minisgl").setLevel(logging.INFO if args.output == "text" else logging.WARNING)
    try:
        with llm_class(**options) as llm:
            prompts = [_encode(llm, prompt, args.chat) for prompt in args.prompt]
            show_json(llm, prompts, params) if args.output == "json" else show_text(llm, prompts, params)
    except ValueError as error:
        fail(str(error))
    except EngineFailure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _encode(llm: BaseLLM, prompt: str, chat: bool) -> list[int]:
    if chat:
        return llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return llm.tokenizer.encode(prompt)


def show_json(llm: BaseLLM, prompts: list[list[int]], params: SamplingParams) -> None:
    """One object a prompt, one a line, and nothing else on standard output."""
    for completion in llm.generate(prompts, params):
        print(json_line(completion_dict(completion)), flush=True)


def completion_dict(completion: Completion) -> dict[str, Any]:
    """What no flag asks for, logprobs, is left out."""
    return {name: value for name, value in dataclasses.asdict(completion).items() if value is not None}


def show_text(llm: BaseLLM, prompts: list[list[int]], params: SamplingParams) -> None:
    """One prompt streams; of several, the first unfinished one streams and the others wait their turn."""
    start = time.perf_counter()
    first, tokens = 0.0, 0
    shown = _Ordered(len(prompts))
    with closing(llm.stream(prompts, params)) as chunks:
        for chunk in chunks:
            first = first or time.perf_counter()
            tokens += len(chunk.token_ids)
            shown.add(chunk)
    seconds = time.perf_counter() - start
    facts = [f"{tokens} tokens", f"{tokens / seconds:.1f} tokens/s", f"TTFT {(first - start) * 1000:.0f} ms"]
    facts += [f"{name.replace('_', ' ')} {value}" for name, value in llm.stats().items()]
    print(f"[{' · '.join(facts)}]", file=sys.stderr)


class _Ordered:
    """Prints interleaved chunks as whole answers in the order of the prompts."""

    def __init__(self, count: int) -> None:
        self.texts = [""] * count
        self.done = [False] * count
        self.current = 0

    def add(self, chunk: Chunk) -> None:
        self.texts[chunk.index] += chunk.text
        self.done[chunk.index] = chunk.finish_reason is not None
        while self.current < len(self.texts):
            sys.stdout.write(self.texts[self.current])
            self.texts[self.current] = ""
            if not self.done[self.current]:
                break
            sys.stdout.write("\n")
            self.current += 1
        sys.stdout.flush()


def fail(message: str) -> NoReturn:
    """One line on standard error, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _plain_type(hint: Any) -> type:
    """int | None -> int."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return typing.cast(type, hint)
