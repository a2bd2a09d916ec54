"""Makes .venv and runs one thing in it: the server, the checks or the notebooks. Knows nothing of what those do.

    python3 dev/setup.py serve [server flags]     the server, in the foreground
    python3 dev/setup.py test [pytest arguments]  ruff, mypy and the tests: what CI runs
    python3 dev/setup.py notebooks [NOTEBOOK]     JupyterLab, with the first notebook open, or another of this checkout
    python3 dev/setup.py site                     the course as a website, in build/site

Needs only Python 3.10 to 3.13. The first run installs (a minute or two); later ones see that nothing changed and start
at once. An install that was interrupted, by Ctrl-C or otherwise, is begun again.
"""

from __future__ import annotations  # an old Python must get as far as the error that says so

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "minisgl-setup.json"
PYTHON = str(VENV / "bin" / "python")

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = {"serve": set(), "test": {"dev", "notebooks", "site"}, "notebooks": {"notebooks"}, "site": {"site"}}
MODULES = {
    "serve": ["minisgl.stage8"],
    "site": ["sphinx", "-q", "-W", "-c", "dev/site", ".", "build/site"],
}
FIRST_NOTEBOOK = ROOT / "notebooks" / "stage1_naive.ipynb"
WORKERS = min(2, os.cpu_count() or 1)  # that run the tests, a file each: many tests start processes of their own
STEPS = {
    "ruff check": ["ruff", "check"],
    "ruff format": ["ruff", "format", "--check"],
    "mypy": ["mypy"],
    "pytest": ["pytest", "-n", str(WORKERS), "--dist", "loadfile", "-m", "not gpu and not soak", "--durations=15"],
}
START = time.monotonic()


@dataclass(frozen=True)
class Install:
    """What is in .venv: made by which Python, for which checkout, from which pyproject.toml, with which extras."""

    python: str
    root: str  # an environment that was moved is broken
    project: str
    extras: list[str]
    finished: bool = False

    def serves(self, wanted: Install) -> bool:
        """Whether nothing need be installed to have `wanted`."""
        return self.can_grow_into(wanted) and self.project == wanted.project and set(wanted.extras) <= set(self.extras)

    def can_grow_into(self, wanted: Install) -> bool:
        """Whether pip can make `wanted` of it; a half-finished one cannot be trusted."""
        return self.finished and (self.python, self.root) == (wanted.python, wanted.root)


def main() -> None:
    """Installs what the command needs, then becomes it (or, for test, exits with the first failure's status)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=EXTRAS)
    command = parser.parse_args(sys.argv[1:2]).command
    rest = sys.argv[2:]
    gpu = has_gpu()
    install(EXTRAS[command] | ({"cuda"} if gpu else set()), torch_attempts(platform.system(), gpu))
    if command == "test":
        sys.exit(run_checks(rest))
    module = [*MODULES[command], *rest] if command in MODULES else jupyterlab(rest)
    say(f"starting {module[0]}")
    os.execv(PYTHON, [PYTHON, "-m", *module])  # signals and the exit status are then its own


def jupyterlab(arguments: list[str]) -> list[str]:
    """The module and its arguments, for the notebook among these or else the first. JupyterLab prints its address
    itself, and goes on without a browser."""
    named = [argument for argument in arguments if argument.endswith(".ipynb")]
    notebook = Path(named[0]).resolve() if named else FIRST_NOTEBOOK
    if not notebook.is_file() or ROOT not in notebook.parents:
        sys.exit(f"error: there is no notebook {notebook} in {ROOT}: ls {FIRST_NOTEBOOK.parent} shows them")
    path = notebook.relative_to(ROOT).as_posix()
    say(f"{path} opens in your browser; without one, open the address http://localhost:…/{path}?token=… printed below")
    rest = [argument for argument in arguments if argument not in named]
    return ["jupyterlab", f"--ServerApp.root_dir={ROOT}", f"--LabApp.default_url=/lab/tree/{path}", *rest]


def has_gpu() -> bool:
    """Whether this machine seems to have an NVIDIA GPU; asked before there is a torch to ask."""
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia[0-9]*"))


def torch_attempts(system: str, gpu: bool) -> list[list[str]]:
    """pip arguments to try in turn for a torch that fits; none where the default index has the right build anyway.

    Only Linux without a GPU needs care: its default build brings several GB of CUDA. The version is pinned there, so
    that an index or folder which holds a CPU build of just that version is used.
    """
    if gpu or system != "Linux":
        return []
    return [["--index-url", CPU_INDEX, "--retries", "0", "--timeout", "10", TORCH], [TORCH]]


def install(extras: set[str], attempts: list[list[str]]) -> None:
    """Brings .venv up to date; a no-op of milliseconds when it is."""
    project = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    wanted = Install(sys.version, str(ROOT), project, sorted(extras))
    found = read_stamp()
    if found and found.serves(wanted):
        return
    check_python()
    if found and found.can_grow_into(wanted):
        wanted = replace(wanted, extras=sorted(extras | set(found.extras)))
        write_stamp(wanted)
    else:
        fresh_venv(wanted)
    pip = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    if attempts:
        say("installing torch for the CPU (up to 200 MB to download)")
        for number, attempt in enumerate(attempts):
            if number:
                say(f"{TORCH} is not to be had there: trying pip's usual index")
            if run_apart([*pip, *attempt]) == 0:
                break
        else:
            sys.exit(f"error: pip could not install {TORCH}; its own words are above")
    target = f"minisgl[{','.join(wanted.extras)}]" if wanted.extras else "minisgl"
    say(f"installing {target} and what it needs")
    if run_apart([*pip, "--editable", target.replace("minisgl", str(ROOT), 1)]):
        sys.exit("error: pip could not install minisgl; its own words are above")
    write_stamp(replace(wanted, finished=True))
    say("installed")


def read_stamp() -> Install | None:
    """What the last run left in .venv; None without one. Exits if .venv is somebody else's, rather than replace it."""
    if not VENV.exists() or not any(VENV.iterdir()):
        return None
    try:
        return Install(**json.loads(STAMP.read_text()))
    except (OSError, ValueError, TypeError):
        sys.exit(f"error: {VENV} was not made by this script: move it away and try again")


def write_stamp(stamp: Install) -> None:
    """Notes in .venv what is, or is about to be, in it."""
    STAMP.write_text(json.dumps(asdict(stamp)))


def check_python() -> None:
    """Exits with one line if this Python cannot carry the package."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        have = platform.python_version()
        sys.exit(f"error: Python {have} is not among 3.10 to 3.13: use another, e.g. python3.12 {sys.argv[0]}")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        sys.exit(
            f"error: {sys.executable} comes without venv and pip: install them (Debian, Ubuntu: apt install {package})"
        )


def fresh_venv(wanted: Install) -> None:
    """An empty .venv in place of whatever an older or unfinished install left."""
    say(f"making {VENV} for Python {platform.python_version()}")
    old = VENV.with_name(".venv.old")  # out of the way at once: one that is half deleted might have lost its stamp
    shutil.rmtree(old, ignore_errors=True)
    if VENV.exists():
        VENV.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    VENV.mkdir()
    write_stamp(wanted)  # first, so that an interrupted run is known for what it is
    if run_apart([sys.executable, "-m", "venv", str(VENV)]):
        sys.exit(f"error: {sys.executable} could not make a virtual environment; its own words are above")


def run_checks(pytest_arguments: list[str]) -> int:
    """Runs every check, even after a failure, and returns the first failure's exit status."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # two processes with two threads each crawl on two cores
    failures = {}
    for name, arguments in STEPS.items():
        say(f"{name} …")
        extra = pytest_arguments if name == "pytest" else []
        status = run([PYTHON, "-m", *arguments, *extra], environment)
        say(f"{name}: {f'FAILED (exit {status})' if status else 'ok'}")
        if status:
            failures[name] = status
    say(f"failed: {', '.join(failures)}" if failures else "all checks passed")
    return next(iter(failures.values()), 0)


def run(command: list[str], environment: dict[str, str] | None = None) -> int:
    """Runs a command in the checkout, its output shown, and returns its exit status (128 + n for signal n)."""
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    return status if status >= 0 else 128 - status


def run_apart(command: list[str]) -> int:
    """As `run`, but out of the terminal's reach: Ctrl-C is for us, who end it with all that it has started. Its own
    words would be a traceback."""
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        try:
            status = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return status if status >= 0 else 128 - status


def leave(number: int, frame: object) -> None:
    """Raises SystemExit, so that nothing is left running."""
    sys.exit(128 + number)


def say(text: str) -> None:
    """One line of progress, on stderr, with the seconds since the start."""
    print(f"setup {time.monotonic() - START:6.1f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is signal.SIG_DFL:  # under nohup it is ignored, and what we become shall do so too
            signal.signal(ending, leave)
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
