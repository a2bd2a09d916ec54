"""The server's command line: flags to a checked ServerConfig. Knows nothing of what is done with it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from minisgl.core.cli import (
    Parser,
    add_config_arguments,
    add_mine_argument,
    add_prompt_arguments,
    config_options,
    sampling_params,
)
from minisgl.core.config import make_config
from minisgl.stage8.server_config import ServerConfig

PROCESSES = """
processes:
  1                    the API: HTTP, and the parent of the others
  --tp N               N schedulers, each with the engine of one device
  --num-tokenizer N    N tokenizers and a detokenizer; with 0, the default, one process is both
so that the default is 3, and `--tp 2 --num-tokenizer 2` is 6.
With --prompt the answers are printed and the server ends, with --shell one talks to it here: no port is opened.
"""


def parse(argv: Sequence[str] | None, prog: str, more_help: str = "") -> tuple[ServerConfig, argparse.Namespace]:
    """The settings, and the arguments of which --prompt, --shell and what belongs to them are of interest.

    Ends the program with status 2 and one line on standard error when a value is wrong.
    """
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=prog, formatter_class=as_it_is, epilog=PROCESSES + more_help, allow_abbrev=False)
    add_config_arguments(parser, ServerConfig)
    add_prompt_arguments(parser)
    parser.add_argument("--shell", action="store_true", help="chat here in the terminal, one request at a time")
    add_mine_argument(parser)
    args = parser.parse_args(argv)
    try:
        if args.shell and args.prompt:
            raise ValueError("--shell asks for prompts itself: leave out --prompt")
        sampling_params(args)
        config = make_config(ServerConfig, config_options(ServerConfig, args))
        return replace(config, max_running_requests=1, log_level="warning") if args.shell else config, args
    except ValueError as error:
        parser.error(str(error))


def num_processes(config: ServerConfig) -> int:
    """All of them, the API's own included."""
    return 1 + config.tp + 1 + config.num_tokenizer
