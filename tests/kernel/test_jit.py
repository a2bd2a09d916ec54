"""What is compiled is compiled once, whole, and only where it can be; else the reason and the remedy are said."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minisgl.kernel import cuda_rows, jit, prefix, rows, selftest

INSTANCE = jit.Instance("prefix.cpp", "minisgl::common_prefix", "cpu")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What a process looks up once is looked up anew in each test, and after it."""
    caches = (jit._compiler_or_reason, jit._sources, prefix._fastest)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.fixture
def ffi() -> None:
    pytest.importorskip("tvm_ffi")
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler first on PATH that notes each compilation in the file returned, and then is the real one."""
    notes, real = tmp_path / "compilations", shutil.which("c++")
    wrapper = tmp_path / "bin" / "c++"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo one >> {notes};; esac\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    return notes


RUN = """
import sys, torch
from pathlib import Path
from minisgl.kernel import jit
run = jit.load(jit.Instance("prefix.cpp", "minisgl::common_prefix", "cpu"), Path(sys.argv[1]))
print(run(torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([1, 2, 4, 5], dtype=torch.int32)))
"""


@pytest.mark.slow
def test_two_processes_compile_once_and_a_third_not_at_all(ffi: None, counted: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path / "kernels")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in started:
        assert process.communicate(timeout=120)[0] == "2\n"
    assert counted.read_text() == "one\n", "both compiled it"
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "2\n"
    assert counted.read_text() == "one\n", "a steady state compiles nothing"
    assert len(list((tmp_path / "kernels").glob("*.so"))) == 1


def test_a_key_for_all_that_decides_the_result(ffi: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [jit.key(INSTANCE)]
    assert jit.key(INSTANCE) == keys[0]
    keys.append(jit.key(jit.Instance(INSTANCE.file, INSTANCE.function, "sm_90")))
    keys.append(jit.key(jit.Instance(INSTANCE.file, "minisgl::another", "cpu")))
    with monkeypatch.context() as patch:
        patch.setattr(jit, "tvm_ffi_version", lambda: "9.9")
        keys.append(jit.key(INSTANCE))
    changed = shutil.copytree(jit.CSRC, tmp_path / "csrc")
    (changed / "check.h").write_text((changed / "check.h").read_text() + "\n")
    monkeypatch.setattr(jit, "CSRC", changed)
    jit._sources.cache_clear()
    keys.append(jit.key(INSTANCE))
    assert len(set(keys)) == len(keys)


def test_what_was_built_elsewhere_is_taken_where_no_compiler_is(
    ffi: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(jit.CannotCompile, match="no C\\+\\+ compiler is on PATH: install g\\+\\+"):
        jit.build(INSTANCE, tmp_path)
    ready = tmp_path / f"prefix-cpu-{jit.key(INSTANCE)}-1.2.so"
    ready.touch()
    (tmp_path / f"prefix-cpu-{'0' * 16}-1.2.so").touch()
    assert jit.build(INSTANCE, tmp_path) == ready
    with pytest.raises(jit.CompileFailed, match="does not load .*: delete it to build it anew"):
        jit.load(INSTANCE, tmp_path)


def test_no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(jit.CannotCompile, match=r"nvcc is neither on PATH nor in \$CUDA_HOME/bin: install the CUDA"):
        jit.find_compiler("sm_90")


def test_what_does_not_compile_says_where(ffi: None, tmp_path: Path) -> None:
    with pytest.raises(jit.CompileFailed, match="does not compile prefix.cpp: .*error.*nothing_like_it"):
        jit.build(jit.Instance("prefix.cpp", "minisgl::nothing_like_it", "cpu"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["build.lock"]


def test_a_cache_that_cannot_be_written(ffi: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(jit.CannotCompile, match="cannot be written .*set XDG_CACHE_HOME"):
        jit.build(INSTANCE, tmp_path / "file" / "kernels")


@pytest.mark.parametrize("lacks", ["package", "link"])
def test_without_tvm_ffi_all_goes_on(
    lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And where torch is too old for it: it would compile its own link to torch, for a minute."""
    if lacks == "package":
        monkeypatch.setattr(jit.importlib.util, "find_spec", lambda name: None)
        says = "pip install apache-tvm-ffi"
    else:
        monkeypatch.setattr(jit.importlib.util, "find_spec", lambda name: object())
        monkeypatch.delattr(torch._C.TensorBase, "__dlpack_c_exchange_api__", raising=False)
        monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
        says = "use torch 2.10 or later"
    with caplog.at_level(logging.DEBUG, "minisgl"):
        assert prefix.common_length(torch.tensor([5, 6]).int(), torch.tensor([5, 7]).int()) == 1
    assert says in caplog.text
    assert list(rows.row_kernels(torch.device("cpu"))) == ["torch"]


def test_sources_are_a_part_of_the_package() -> None:
    """An installed minisgl has no checkout beside it."""
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    data = re.search(r"\[tool\.setuptools\.package-data\]\n((?:.+\n)+)", pyproject)
    assert data is not None
    assert '"csrc/*"' in data[1]
    assert {path.suffix for path in jit.CSRC.iterdir()} == {".h", ".cuh", ".cu", ".cpp"}, "and no folders"


def test_the_page_quotes_the_checks_as_they_are() -> None:
    page = (Path(__file__).parents[2] / "chapters/stage7_overlap/kernels.md").read_text()
    source = (jit.CSRC / "store.cu").read_text().splitlines()
    quoted = re.search(r"```cpp\n(.*?)```", page, re.DOTALL)
    place = re.search(r"`store\.cu:(\d+): v: size 0", page)
    assert quoted is not None
    assert place is not None
    assert quoted[1].splitlines() == [line.strip() for line in source if "Want(" in line]
    assert 'check("v", v)' in source[int(place[1]) - 1]


def test_sizes_of_packets_and_parts() -> None:
    """A row of smollm2's K, Llama's, an odd one; its embedding (2 parts of 36 packets), Llama's, an odd one."""
    assert [cuda_rows.packet(size) for size in (128, 256, 40, 6, 5)] == [16, 16, 8, 2, 1]
    assert [cuda_rows.parts(size) for size in (1152, 8192, 2048, 512, 40, 16 * 33)] == [2, 8, 4, 1, 1, 1]
    for size in range(1, 9000):
        count = cuda_rows.parts(size)
        assert size % (count * cuda_rows.packet(size)) == 0, f"{size} bytes in {count} parts"


def test_early_launches_from_hopper_on() -> None:
    assert cuda_rows.store_instance(2048, 256, "sm_90").function == "minisgl::Store<2048, 16, 128, true>::run"
    assert cuda_rows.gather_instance(2048, "sm_80").function == "minisgl::Gather<2048, 16, 4, 128, false>::run"


def test_the_selftest_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert selftest.main(["--arch", "sm_90"]) == 0, "what is missing is not broken"
    states = {line[8:22].strip(): line[:8].strip() for line in capsys.readouterr().out.splitlines()}
    assert (states["C++ compiler"], states["nvcc"]) == ("missing", "missing")
    with pytest.raises(SystemExit):
        selftest.main(["--arch", "9.0a"])


def test_the_selftest_finds_a_compiler_that_does_not_work(
    ffi: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrapper = tmp_path / "c++"
    wrapper.write_text("#!/bin/sh\necho 'c++ 12.2.0'\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert selftest.main([]) == 1
    assert "broken  prefix.cpp" in capsys.readouterr().out
