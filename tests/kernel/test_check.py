"""csrc/check.h: what fits passes, what does not is refused with its place, both values and whose they are."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel import jit

pytest.importorskip("tvm_ffi")
if shutil.which("c++") is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

PROBE = Path(__file__).with_name("check_probe.cpp")
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return jit.load(jit.Instance(str(PROBE), "probe", "cpu"), tmp_path_factory.mktemp("kernels"))


def tensors(**other: Tensor) -> list[Tensor]:
    """That fit together, but for the others."""
    fit = {"k": torch.zeros(5, 8), "v": torch.zeros(5, 8), "cache": torch.zeros(30, 8), "out_loc": torch.zeros(5).int()}
    return list({**fit, **other}.values())


def place(name: str) -> str:
    lines = PROBE.read_text().splitlines()
    return f"check_probe.cpp:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'// line: {name}'))}"


def test_what_fits(probe: Run) -> None:
    assert probe(*tensors()) == 8 * 1000 + 4
    wide = torch.zeros(5, 3 * 8)
    assert probe(*tensors(k=wide[:, :8], v=wide[:, 16:], out_loc=torch.zeros(5).long())) == 24 * 1000 + 4
    half = {name: torch.zeros(n, 8, dtype=torch.bfloat16) for name, n in (("k", 5), ("v", 5), ("cache", 30))}
    assert probe(*tensors(**half)) == 8 * 1000 + 2


def test_the_stride_of_one_is_free(probe: Run) -> None:
    """One token, or one element a token: torch gives their strides any value."""
    k, v = torch.zeros(1, 24)[:, :8], torch.zeros(1, 8)
    assert probe(*tensors(k=k, v=v, out_loc=torch.zeros(1).int())) % 1000 == 4
    narrow = torch.zeros(5, 1).as_strided((5, 1), (1, 7))
    assert probe(*tensors(k=narrow, v=narrow, cache=torch.zeros(30, 1))) == 1004


@pytest.mark.parametrize(
    ("other", "line", "says"),
    [
        ({"v": torch.zeros(4, 8)}, "k and v", "v: size 0 (tokens) is 4, and k has 5"),
        ({"v": torch.zeros(5, 9)}, "k and v", "v: size 1 (dim) is 9, and k has 8"),
        ({"v": torch.zeros(5, 16)[:, :8]}, "k and v", "v: stride 0 (token stride) is 16, and k has 8"),
        ({"k": torch.zeros(8, 5).T}, "k and v", "k: stride 1 is 5, not 1"),
        ({"k": torch.zeros(5)}, "k and v", "k has 1 dimensions, not 2"),
        ({"v": torch.zeros(5, 8).half()}, "k and v", "v: dtype is float16, and k has float32"),
        ({"cache": torch.zeros(30, 16)}, "cache", "cache: size 1 (dim) is 16, and k has 8"),
        ({"cache": torch.zeros(30, 16)[:, :8]}, "cache", "cache: stride 0 is 16, not 8"),
        ({"out_loc": torch.zeros(6).int()}, "out_loc", "out_loc: size 0 (tokens) is 6, and k has 5"),
        ({"out_loc": torch.zeros(5)}, "out_loc", "out_loc: out_loc's dtype is float32, not int32 or int64"),
        ({"out_loc": torch.zeros(10).int()[::2]}, "out_loc", "out_loc: stride 0 is 2, not 1"),
    ],
)
def test_what_does_not_fit(probe: Run, other: dict[str, Tensor], line: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'{place(line)}: {says}')}$"):
        probe(*tensors(**other))


def test_conditions_and_names_without_a_value(probe: Run) -> None:
    for count, line, says in (
        (100, "require", "more than 99 tokens"),
        (99, "never", "never bound is asked for before"),
    ):
        many = torch.zeros(count, 8)
        with pytest.raises(ValueError, match=f"^{re.escape(f'{place(line)}: {says}')}"):
            probe(*tensors(k=many, v=many, out_loc=torch.zeros(count).int()))


def test_the_device(tmp_path: Path) -> None:
    run = jit.load(jit.Instance(str(PROBE), "on_gpu", "cpu"), tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"{place('gpu')}: x is on cpu, not on cuda:0")):
        run(torch.zeros(3))
