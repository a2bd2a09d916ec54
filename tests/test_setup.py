"""The set-up script: which torch it chooses, and when an environment may be used as it is."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

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


def test_ci_runs_the_documented_command() -> None:
    assert (SCRIPT.parent.parent / ".ci" / "run").read_text().rstrip().endswith("exec python3 dev/setup.py test")
