"""`python -m minisgl.stage7 --prompt TEXT`: this stage from the command line."""

from minisgl.core.cli import main
from minisgl.stage7.llm import LLM

if __name__ == "__main__":
    raise SystemExit(main(LLM))
