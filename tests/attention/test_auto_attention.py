"""What `--attn auto` takes on machines that are not here, and that one line says what it is and why."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from minisgl.attention import choose, create_attention
from minisgl.attention.hybrid import HybridAttention
from minisgl.attention.paged_torch import PagedTorchAttention
from minisgl.kernel import triton_runs
from minisgl.kernel.triton_runs import no_compiler

SHAPE = 16, 8, 128, 16, torch.bfloat16, torch.device("cuda", 0)
DRIVER = "triton.backends.nvidia.driver"

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A GPU, packages that are installed, and what Triton lacks. All kernels load, but for those of `broken`."""

    def be(capability: tuple[int, int], *packages: str, lacks: str | None = None, broken: str = "") -> None:
        def part(name: str, shape: object) -> tuple[object, str]:
            if name == broken:
                raise RuntimeError("nvcc not found\nat some place") if capability >= (9, 0) else AssertionError
            return object(), f"{name}'s kernel"

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: object() if name in packages else None)
        monkeypatch.setattr(choose, "no_compiler", lambda: lacks)
        monkeypatch.setattr(choose, "_prefill_part", part)
        monkeypatch.setattr(choose, "_decode_part", part)
        monkeypatch.setattr(choose, "_recorded_steps", lambda *parts: None)

    return be


def auto(caplog: pytest.LogCaptureFixture) -> tuple[object, str]:
    """The backend, and the one line about it."""
    with caplog.at_level(logging.INFO, "minisgl"):
        found = create_attention("auto", *SHAPE)
    (said,) = [record.getMessage() for record in caplog.records]
    return found, said


def test_what_is_taken_and_why(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine((9, 0), "flashinfer", "triton")
    found, said = auto(caplog)
    assert isinstance(found, HybridAttention)
    assert said.startswith("attention: prefill by fi's kernel, decode by triton's kernel, 2 query heads a KV head")
    assert said.endswith(
        "(auto: these are the fastest on an H200; `python -m minisgl.benchmark kernels` compares here)"
    )


@pytest.mark.parametrize(
    ("packages", "lacks", "broken", "takes", "because"),
    [
        (("triton",), None, "", ("triton", "triton"), "fi needs the package flashinfer"),
        (("flashinfer", "triton"), None, "fi", ("triton", "triton"), "fi failed: nvcc not found"),
        (("flashinfer", "triton"), "triton needs a C compiler", "", ("fi", "fi"), "triton needs a C compiler"),
        (("flashinfer",), None, "", ("fi", "fi"), "triton needs the package triton"),
    ],
)
def test_the_next_best(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    packages: tuple[str, ...],
    lacks: str | None,
    broken: str,
    takes: tuple[str, str],
    because: str,
) -> None:
    machine((9, 0), *packages, lacks=lacks, broken=broken)
    found, said = auto(caplog)
    assert isinstance(found, HybridAttention)
    assert "prefill by {}'s kernel, decode by {}'s kernel".format(*takes) in said
    assert said.count(because) == 1


def test_an_error_without_words(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine((8, 0), "flashinfer", "triton", broken="fi")
    assert "(auto: fi failed: AssertionError)" in auto(caplog)[1]


@pytest.mark.parametrize(
    ("capability", "packages", "lacks", "because"),
    [
        ((7, 5), ("flashinfer", "triton"), None, "triton needs a GPU of compute capability 8.0 or more"),
        ((9, 0), (), None, "triton needs the package triton, which is not installed"),
        ((9, 0), ("triton",), "triton needs a C compiler", "triton needs a C compiler"),
    ],
)
def test_plain_torch_is_left(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    packages: tuple[str, ...],
    lacks: str | None,
    because: str,
) -> None:
    machine(capability, *packages, lacks=lacks)
    found, said = auto(caplog)
    assert isinstance(found, PagedTorchAttention)
    assert said.startswith("attention: plain torch, slow (")
    assert said.count(because) == 1


def test_a_cpu_has_no_choice(caplog: pytest.LogCaptureFixture) -> None:
    """So it is no line of every run."""
    with caplog.at_level(logging.DEBUG, "minisgl"):
        create_attention("auto", *SHAPE[:4])
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.DEBUG, "attention: plain torch (auto: a CPU has no other)")


def test_triton_by_name_without_a_compiler_is_refused(machine: Machine) -> None:
    machine((9, 0), "triton", lacks="triton needs a C compiler")
    with pytest.raises(ValueError, match="--attn triton: triton needs a C compiler; --attn auto takes what runs here"):
        create_attention("triton", *SHAPE)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Triton's link to the GPU, of a release that compiles it when it first runs."""
    made = ModuleType(DRIVER)
    made.compile_module_from_src = None  # type: ignore[attr-defined]
    for end in range(1, 5):
        name = ".".join(DRIVER.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, made if name == DRIVER else ModuleType(name))
    no_compiler.cache_clear()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton_runs.shutil, "which", lambda name: f"/bin/{name}" if name == "clang" else None)
    monkeypatch.setattr(triton_runs.Path, "exists", lambda self: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(triton_runs.importlib.util, "find_spec", lambda name: object())
    return made


def test_a_machine_that_has_what_triton_needs(driver: ModuleType) -> None:
    assert no_compiler() is None
    assert triton_runs.triton_runs(SHAPE[-1])


def test_no_c_compiler(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start would end with Triton's error, in the midst of its first step."""
    monkeypatch.setattr(triton_runs.shutil, "which", lambda name: None)
    assert no_compiler() == "triton needs a C compiler, and there is none: install gcc, or set CC"
    assert not triton_runs.triton_runs(SHAPE[-1])
    no_compiler.cache_clear()
    monkeypatch.setenv("CC", "my-cc")
    assert no_compiler() is None


def test_no_headers_of_python(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runs.Path, "exists", lambda self: self.name != "Python.h")
    said = no_compiler()
    assert said is not None
    assert said.startswith("triton needs Python's headers, and there is no /")
    assert said.endswith("/Python.h: install python3-dev")


def test_a_triton_that_compiles_nothing(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.9 does not."""
    monkeypatch.setattr(triton_runs.shutil, "which", lambda name: None)
    del driver.compile_module_from_src
    assert no_compiler() is None


@pytest.fixture(autouse=True)
def forgotten() -> None:
    no_compiler.cache_clear()
