"""`python -m minisgl.benchmark WHAT`: chooses a measurement. Measures nothing itself."""

from __future__ import annotations

import argparse

from minisgl.benchmark import stages


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m minisgl.benchmark")
    commands = parser.add_subparsers(dest="what", required=True)
    stages.add_arguments(commands.add_parser("stages", help="every stage beside transformers, on this machine"))
    stages.main(parser.parse_args())


if __name__ == "__main__":
    main()
