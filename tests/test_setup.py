"""The set-up script: which torch it chooses, and when an environment may be used as it is."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "dev" / "setup.py"
spec = importlib.util.spec_from_file_location("minisgl_setup", SCRIPT)
assert spec is not None
assert spec.loader is not None
setup = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = setup
spec.loader.exec_module(setup)

DONE = setup.Install(python="3.11", root="/here", project="abc", extras=["dev"], finished=True)


def test_linux_without_a_gpu_tries_the_cpu_index_then_the_pinned_default() -> None:
    first, second = setup.torch_attempts("Linux", gpu=False)
    assert first[:2] == ["--index-url", "https://download.pytorch.org/whl/cpu"]
    assert first[-1:] == second == [setup.TORCH]
    assert setup.TORCH.startswith("torch==")  # unpinned, the second attempt would bring gigabytes of CUDA


@pytest.mark.parametrize(("system", "gpu"), [("Linux", True), ("Darwin", False)])
def test_elsewhere_the_default_build_is_right(system: str, gpu: bool) -> None:
    assert setup.torch_attempts(system, gpu) == []


@pytest.mark.parametrize(("statuses", "ends_well"), [([1, 0, 0], True), ([1, 1], False)])
def test_the_errors_of_an_attempt_are_not_left_unexplained(
    statuses: list[int], ends_well: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip prints its own, in red, where the first index is out of reach; the second attempt is then all that counts."""
    monkeypatch.setattr(setup, "read_stamp", lambda: None)
    monkeypatch.setattr(setup, "fresh_venv", lambda wanted: None)
    monkeypatch.setattr(setup, "write_stamp", lambda stamp: None)
    monkeypatch.setattr(setup, "run_apart", lambda command: statuses.pop(0))
    if ends_well:
        setup.install(set(), setup.torch_attempts("Linux", gpu=False))
    else:
        with pytest.raises(SystemExit, match="pip could not install torch"):
            setup.install(set(), setup.torch_attempts("Linux", gpu=False))
    assert statuses == []
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if "not to be had there: trying pip's usual index" in line]) == 1


@pytest.mark.parametrize(
    ("wanted", "serves", "grows"),
    [
        (DONE, True, True),
        (replace(DONE, extras=[]), True, True),
        (replace(DONE, extras=["dev", "notebooks"]), False, True),
        (replace(DONE, project="changed"), False, True),
        (replace(DONE, python="3.12"), False, False),
        (replace(DONE, root="/moved"), False, False),
    ],
)
def test_a_finished_install_is_reused_when_it_holds_what_is_wanted(wanted, serves: bool, grows: bool) -> None:
    assert (DONE.serves(wanted), DONE.can_grow_into(wanted)) == (serves, grows)
    unfinished = replace(DONE, finished=False)
    assert not unfinished.serves(wanted)
    assert not unfinished.can_grow_into(wanted)


def test_jupyterlab_opens_a_notebook(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = SCRIPT.parent.parent
    first = setup.jupyterlab(["--no-browser"])
    assert first == [
        "jupyterlab",
        f"--ServerApp.root_dir={root}",
        "--LabApp.default_url=/lab/tree/notebooks/stage1_naive.ipynb",
        "--no-browser",
    ]
    assert (
        "notebooks/stage1_naive.ipynb opens in your browser; without one, open the address" in capsys.readouterr().err
    )
    monkeypatch.chdir(root / "notebooks")
    second = setup.jupyterlab(["stage2_kv_cache.ipynb", "--port", "9000"])
    assert second[2:] == ["--LabApp.default_url=/lab/tree/notebooks/stage2_kv_cache.ipynb", "--port", "9000"]
    with pytest.raises(SystemExit, match="there is no notebook .*stage99.ipynb"):
        setup.jupyterlab(["stage99.ipynb"])


@pytest.mark.slow
def test_jupyterlab_says_where_it_is(tmp_path: Path) -> None:
    """Without a browser it serves all the same, and prints the notebook's own address, which answers."""
    pytest.importorskip("jupyterlab")
    arguments = setup.jupyterlab(["--no-browser", "--allow-root", "--port=0", "--ServerApp.port_retries=0"])
    environment = {**os.environ, "HOME": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as lab:
        assert lab.stderr is not None
        stopper = threading.Timer(60, lab.kill)
        stopper.start()
        try:
            address = next(found[0] for line in lab.stderr if (found := re.search(r"http://localhost\S+", line)))
            assert "/lab/tree/notebooks/stage1_naive.ipynb?token=" in address
            contents = address.replace("/lab/tree/", "/api/contents/")
            assert fetched(contents)["type"] == "notebook"
        finally:
            stopper.cancel()
            lab.kill()


def fetched(address: str) -> Any:
    """JupyterLab says where it is a moment before it listens there."""
    for _ in range(300):
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(0.1)
    raise AssertionError(f"nobody listens at {address}")


FAKE_VENV = """
import pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
if (folder.parent / "give up").exists():
    sys.exit(f"there already: {sorted(path.name for path in folder.iterdir())}")
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
(folder / "half").touch()
print(below.pid, flush=True)
below.wait()
"""  # as `python -m venv` it does half its work, in a process of its own


@pytest.mark.parametrize(
    ("number", "status", "words"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "making")]
)
def test_an_interrupted_install_ends_quietly_and_is_begun_again(
    tmp_path: Path, number: int, status: int, words: str
) -> None:
    (tmp_path / "dev").mkdir()
    shutil.copy(SCRIPT, tmp_path / "dev")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "venv.py").write_text(FAKE_VENV)
    command = [sys.executable, "dev/setup.py", "serve"]
    options: dict[str, Any] = {"cwd": tmp_path, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options["env"] = {**os.environ, "PYTHONPATH": str(tmp_path / "modules")}
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            assert process.stdout is not None
            below = int(process.stdout.readline())
            os.killpg(process.pid, number)  # as a terminal does: all that belongs to it
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == status
    assert "Traceback" not in errors
    assert words in errors.splitlines()[-1]
    assert not json.loads((tmp_path / ".venv" / "minisgl-setup.json").read_text())["finished"]
    wait_until_gone(below)
    (tmp_path / "give up").touch()
    again = subprocess.run(command, timeout=60, **options)
    assert "there already: ['minisgl-setup.json']" in again.stderr, "nothing of the first"
    assert again.stderr.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / ".venv.old").exists()


def test_interrupted_as_what_it_waits_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C Python's own `wait` gives a child a quarter of a second, in which it may end by itself."""
    wait, interrupts = subprocess.Popen.wait, [KeyboardInterrupt]

    def interrupted(process: Any, timeout: float | None = None) -> int:
        status = wait(process, timeout)
        if interrupts:
            raise interrupts.pop()
        return status

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup.run_apart([sys.executable, "-c", ""])


def wait_until_gone(pid: int) -> None:
    """Or until it is dead, and nobody has asked for its status yet."""
    for _ in range(600):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
        if not state or state.startswith("Z"):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} still runs")


def test_ci_runs_the_documented_command() -> None:
    assert (SCRIPT.parent.parent / ".ci" / "run").read_text().rstrip().endswith("exec python3 dev/setup.py test")
