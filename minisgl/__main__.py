"""`minisgl`, which is `python -m minisgl`: the server of stage 8, or a subcommand. Knows no other stage."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

LEARNING = ("start", "check", "hint", "diff", "progress", "changed", "bug")  # those of learn.commands
COMMANDS = ", ".join((*LEARNING[:5], "where", *LEARNING[5:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what the interpreter still has to write
        return 1


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["where"]:
        from minisgl import where  # only what is asked for is loaded

        return where.main(arguments[1:])
    if arguments[:1] and arguments[0] in LEARNING:
        from minisgl.learn.commands import main as learn

        return learn(arguments)
    if arguments[:1] and not arguments[0].startswith("-"):
        print(
            f"minisgl: error: there is no command {arguments[0]!r}: there are {COMMANDS}; the server has none, only "
            "flags (--help lists them)",
            file=sys.stderr,
        )
        return 2
    from minisgl.stage8.signals import leave_on_signals

    leave_on_signals()  # before the imports, which take a third of a second
    from minisgl.stage8.serve import main as serve

    return serve(arguments, "minisgl", f"\ncommands of the course, instead of flags: {COMMANDS}\n")


if __name__ == "__main__":
    raise SystemExit(main())
