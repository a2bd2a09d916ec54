"""`python -m minisgl.stage8`: the server; with `--prompt TEXT`, this stage from the command line."""

from minisgl.stage8.serve import main

if __name__ == "__main__":
    raise SystemExit(main())
