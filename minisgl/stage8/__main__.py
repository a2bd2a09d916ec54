"""`python -m minisgl.stage8`: the server; with `--prompt TEXT`, this stage from the command line."""

from minisgl.stage8.signals import leave_on_signals

if __name__ == "__main__":
    leave_on_signals()  # before the imports, which take a third of a second

    from minisgl.stage8.serve import main

    raise SystemExit(main())
