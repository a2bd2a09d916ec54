"""`python -m minisgl.stage2 --prompt TEXT`: this stage from the command line."""

from minisgl.core.interrupt import leave_on_interrupt

if __name__ == "__main__":
    leave_on_interrupt()  # before the imports, which take seconds

    from minisgl.core.cli import main
    from minisgl.stage2.llm import LLM

    raise SystemExit(main(LLM))
