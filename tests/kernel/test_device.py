"""Device helpers on this machine, and what other machines' files would say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.kernel import device as d

CPU = torch.device("cpu")


def test_device_names() -> None:
    assert d.resolve_device("cpu") == CPU
    assert d.resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="auto, cpu or cuda, not 'tpu'"):
        d.resolve_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no usable GPU.*--device cpu"):
        d.resolve_device("cuda")


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_auto_on_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int], dtype: str
) -> None:
    """From Ampere on they multiply bfloat16; before, torch emulates it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with caplog.at_level("INFO", "minisgl"):
        assert d.resolve_dtype("auto", torch.device("cuda", 0)) is getattr(torch, dtype)
    has = "has" if dtype == "bfloat16" else "lacks"
    assert caplog.messages == [f"{dtype} on cuda:0 (auto: it {has} native bfloat16)"]


def test_dtype_names() -> None:
    assert d.resolve_dtype("float32", CPU) is torch.float32
    assert d.resolve_dtype("float16", CPU) is torch.float16
    assert d.resolve_dtype("auto", CPU) in (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match=r"float32.*not 'int8'"):
        d.resolve_dtype("int8", CPU)


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 rdpid", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd i8mm bf16 dgh", True),
        ("flags\t\t: fpu avx512f avx2", False),
        ("model name\t: a bf16 machine", False),
    ],
)
def test_native_bf16_by_cpuinfo(tmp_path: Path, line: str, native: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert d._cpu_has_bf16(tmp_path / "cpuinfo") is native


def test_no_cpuinfo_is_no_bf16(tmp_path: Path) -> None:
    assert not d._cpu_has_bf16(tmp_path / "cpuinfo")


def test_free_memory_is_less_than_all() -> None:
    free = d.free_memory(CPU)
    assert 2**24 < free < 2**50


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert d._cgroup_free(tmp_path) == []
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 200\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert d._cgroup_free(tmp_path) == []
    (tmp_path / "memory.max").write_text("1000\n")
    assert d._cgroup_free(tmp_path) == [500]


def test_the_default_pool_of_a_cpu_is_a_capped_share() -> None:
    ratio, free, model = d.pool_terms(CPU, 0.9, 8 << 30, 10**9)
    assert ratio * free - model == 2 << 30
    ratio, free, model = d.pool_terms(CPU, 0.9, 512 << 30, 10**9)
    assert ratio * free - model == 4 << 30
    assert d.pool_terms(torch.device("cuda", 0), 0.9, 100, 10) == (0.9, 100, 10)


def test_copies() -> None:
    tensor = d.device_tensor([1, 2, 3], torch.int32, CPU)
    assert tensor.tolist() == [1, 2, 3]
    assert tensor.dtype == torch.int32
    assert d.device_tensor([], torch.int64, CPU).shape == (0,)
    host, event = d.host_copy(tensor)
    event.synchronize()
    assert host.tolist() == [1, 2, 3]
