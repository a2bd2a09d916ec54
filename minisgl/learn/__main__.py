"""`python -m minisgl.learn`: what makes the course (`generate`), and the learner's own subcommands."""

from __future__ import annotations

import sys

from minisgl.learn.commands import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
