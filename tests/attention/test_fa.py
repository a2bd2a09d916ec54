"""`--attn fa` and `--attn trtllm` by stand-ins of their packages: what they are given, what comes back, who is chosen.
No real FlashAttention is run here, nor TensorRT-LLM's kernels for Blackwell."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import flash_stand_ins as stand_ins
import pytest
import torch
from paged_scene import PagedScene

from minisgl.attention import choose, fa
from minisgl.attention.hybrid import HybridAttention
from minisgl.attention.shape import Shape
from minisgl.core.batch import Batch

CPU = torch.device("cpu")
KINDS = {
    "decode": ([(n - 1, n) for n in (1, 40, 33, 64, 65, 5)], 6),
    "prefill": ([(0, 1), (0, 30), (64, 70), (64, 64 + 33)], 0),
    "mixed": ([(99, 100), (16, 17), (0, 1), (0, 70), (48, 53), (100, 161)], 3),
}


@pytest.fixture
def calls() -> list[str]:
    return []


RELEASES = {
    "3": (fa.RELEASES[0], stand_ins.flash_attn_interface),
    "4 on Hopper": (fa.RELEASES[1], stand_ins.flash_attn_cute),
    "4 on Blackwell": (fa.RELEASES[2], partial(stand_ins.flash_attn_cute, hopper=False)),
    "2": (fa.RELEASES[3], stand_ins.flash_attn),
}


@pytest.fixture(params=[*RELEASES, "fmha"])
def attention(request: pytest.FixtureRequest, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> HybridAttention:
    """Each with pages that it can read."""
    shape = Shape(6, 2, 32, 256 if request.param == "2" else 16, torch.float32, CPU)
    if request.param == "fmha":
        for name, package in stand_ins.flashinfer(calls).items():
            monkeypatch.setitem(sys.modules, name, package)
        monkeypatch.delitem(sys.modules, "minisgl.attention.trtllm", raising=False)
        trtllm = importlib.import_module("minisgl.attention.trtllm")
        monkeypatch.delitem(sys.modules, "minisgl.attention.trtllm")
        monkeypatch.setattr(trtllm, "_WORKSPACE", 64)
        return HybridAttention(trtllm.FmhaPrefill(shape), trtllm.FmhaDecode(shape))
    release, stand_in = RELEASES[request.param]
    kernel = fa.FlashAttention(release, stand_in(calls), shape)
    return HybridAttention(fa.FlashPrefill(kernel), fa.FlashDecode(kernel))


def shape_of(attention: Any) -> Shape:
    part = attention.decode
    return part.shape if hasattr(part, "shape") else part._kernel.shape


@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(attention: HybridAttention, calls: list[str], kind: str) -> None:
    torch.manual_seed(0)
    lengths, num_decode = KINDS[kind]
    scene = PagedScene(lengths, num_decode, shape_of(attention))
    assert scene.error(attention, attention.prepare_metadata(scene.batch, scene.table)) < 1e-5
    kinds = {call.split()[0] for call in calls}
    assert kinds == {"decode": {"decode"}, "prefill": {"extend"}, "mixed": {"decode", "extend"}}[kind]


def test_metadata_does_not_change_with_the_table(attention: HybridAttention) -> None:
    torch.manual_seed(0)
    scene = PagedScene(*KINDS["mixed"], shape_of(attention))
    metadata = attention.prepare_metadata(scene.batch, scene.table)
    used = scene.table.clone()
    scene.table[:] = 0
    scene.table, reset = used, scene.table
    assert scene.error(attention, metadata) < 1e-5
    assert not reset.any()


def test_recorded_decode(attention: HybridAttention) -> None:
    """Long rows before short ones, and dummy rows: nothing of the earlier step is read."""
    torch.manual_seed(0)
    recorded = None
    for lengths in ([(149, 150), (89, 90), (3, 4)], [(2, 3)], [(33, 34), (0, 1)]):
        scene = PagedScene(lengths, len(lengths), shape_of(attention), width=12)
        scene.batch.padded_reqs = scene.batch.reqs + [scene.dummy] * (4 - len(lengths))
        if recorded is None:
            attention.init_capture_graph(4, scene.table)
            recorded = attention.prepare_for_capture(Batch([scene.dummy] * 4, num_decode=4))
        scene.batch.attn_metadata = attention.prepare_metadata(scene.batch, scene.table)
        attention.prepare_for_replay(scene.batch)
        q = torch.randn(4, shape_of(attention).q_heads, shape_of(attention).head_dim)
        eager = attention.decode.attend(q, 0, scene.pool, scene.batch.attn_metadata.decode)
        torch.testing.assert_close(attention.decode.attend(q, 0, scene.pool, recorded.decode), eager)


Installed = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> Installed:
    """A GPU of some generation, and packages that are installed."""
    made: dict[str, ModuleType] = {
        "flash_attn_interface": stand_ins.flash_attn_interface(calls),
        "flash_attn": stand_ins.flash_attn(calls),
        "flash_attn.cute": stand_ins.flash_attn_cute(calls),
    }

    def be(major: int, *packages: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
        monkeypatch.setattr(fa, "_installed", lambda module: module in packages)
        for name in packages:
            monkeypatch.setitem(sys.modules, name, made[name])
        if "flash_attn.cute" in packages:
            monkeypatch.setitem(sys.modules, "flash_attn", made["flash_attn"])

    return be


def shape(page_size: int = 16, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> Shape:
    return Shape(16, 8, head_dim, page_size, dtype, torch.device("cuda", 0))


ALL = ("flash_attn_interface", "flash_attn", "flash_attn.cute")


@pytest.mark.parametrize(
    ("major", "packages", "page_size", "name"),
    [
        (9, ALL, 16, "FlashAttention 3"),
        (10, ALL, 16, "FlashAttention 4"),
        (9, ("flash_attn.cute",), 16, "FlashAttention 4"),
        (9, ("flash_attn", "flash_attn.cute"), 256, "FlashAttention 4"),
        (9, ("flash_attn",), 256, "FlashAttention 2"),
        (8, ALL, 512, "FlashAttention 2"),
        (12, ALL, 256, "FlashAttention 2"),
    ],
)
def test_which_release(machine: Installed, major: int, packages: tuple[str, ...], page_size: int, name: str) -> None:
    machine(major, *packages)
    prefill, words = choose._prefill_part("fa", shape(page_size))
    assert words == name
    assert isinstance(prefill, fa.FlashPrefill)
    decode, words = choose._decode_part("fa", shape(page_size))
    assert words == name
    assert isinstance(decode, fa.FlashDecode)


@pytest.mark.parametrize(
    ("major", "packages", "asked", "says"),
    [
        (
            9,
            (),
            shape(),
            [r"3 needs the package flash-attn-3 \(module flash_attn_interface\), which is not", "flash-attn-4"],
        ),
        (10, ("flash_attn",), shape(), ["flash-attn-4 .*, which is not", "--page-size .* multiple of 256, not 16"]),
        (9, ("flash_attn_interface",), shape(head_dim=20), ["multiple of 8 and at most 256, not 20"]),
        (9, ("flash_attn.cute",), shape(head_dim=72), ["multiple of 16 and at most 256, not 72"]),
        (10, ("flash_attn.cute",), shape(head_dim=192), ["multiple of 16 and at most 128, not 192"]),
        (
            8,
            ALL[:2],
            shape(page_size=64),
            ["^--attn fa: FlashAttention 2 needs --page-size .* multiple of 256, not 64"],
        ),
        (13, ALL, shape(), ["no FlashAttention reads pages on a GPU of compute capability 13.x"]),
    ],
)
def test_why_none(machine: Installed, major: int, packages: tuple[str, ...], asked: Shape, says: list[str]) -> None:
    machine(major, *packages)
    with pytest.raises(ValueError, match=r"^--attn fa: .* --attn auto takes what runs here$") as error:
        choose.create_attention("fa", *asked)
    for part in says:
        error.match(part)


def test_it_needs_no_triton(machine: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(9, "flash_attn.cute")
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda module: None)
    assert isinstance(choose.create_attention("fa", *shape()), HybridAttention)


def test_one_that_does_not_load(machine: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next is taken, and where there is none the error says why."""
    machine(9, "flash_attn_interface", "flash_attn.cute")
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    assert choose._decode_part("fa", shape())[1] == "FlashAttention 4"
    machine(9, "flash_attn_interface")
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    with pytest.raises(ValueError, match="FlashAttention 3 does not load here .*: No module named 'flash_attn_int"):
        choose.create_attention("fa", *shape())


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 4 alone makes one of the name that 2 has."""
    (tmp_path / "only_a_folder" / "within").mkdir(parents=True)
    (tmp_path / "only_a_folder" / "within" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert fa._installed("only_a_folder.within")
    assert not fa._installed("only_a_folder")


def test_a_package_within_one_that_is_not_there() -> None:
    assert fa._installed("json.decoder")
    assert not fa._installed("json.nothing")
    assert not fa._installed("nothing_like_it.cute")


@pytest.mark.parametrize("name", ["fa", "trtllm", "fa,triton", "triton,trtllm"])
def test_on_a_cpu_it_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"--attn {name}: .* needs a CUDA GPU; --attn auto"):
        choose.create_attention(name, 4, 2, 16, 16)


@pytest.mark.parametrize("name", ["fa", "trtllm"])
def test_no_float32(machine: Installed, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine(9)
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda module: object())
    with pytest.raises(ValueError, match=f"{name} has no float32 kernels"):
        choose.create_attention(name, *shape(dtype=torch.float32))


def test_trtllm_wants_hopper_and_pages_that_xqa_reads(machine: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda module: object())
    machine(8)
    with pytest.raises(ValueError, match="trtllm needs a GPU of compute capability 9.0"):
        choose.create_attention("trtllm", *shape())
    machine(9)
    with pytest.raises(ValueError, match=r"--page-size must be one of \(16, 32, 64, 128\), not 8"):
        choose._decode_part("trtllm", shape(page_size=8))
