"""`python -m minisgl.stage2 --prompt TEXT`: this stage from the command line."""

from minisgl.core.cli import main
from minisgl.stage2.llm import LLM

if __name__ == "__main__":
    raise SystemExit(main(LLM))
