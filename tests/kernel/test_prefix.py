"""The common prefix of two sequences, in each form that is here, against a loop."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minisgl.kernel import jit
from minisgl.kernel.prefix import PREFIX, common_length, common_length_numpy

Common = Callable[[Tensor, Tensor], int]


@pytest.fixture(scope="module", params=["chosen", "numpy", "c++"])
def common(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Common:
    if request.param == "c++":
        if importlib.util.find_spec("tvm_ffi") is None or shutil.which("c++") is None:
            pytest.skip("needs tvm_ffi and a C++ compiler")
        return jit.load(PREFIX, tmp_path_factory.mktemp("kernels"))
    return common_length if request.param == "chosen" else common_length_numpy


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 127, 128, 1000])
def test_against_a_loop(common: Common, length: int) -> None:
    """Parting at every place, where a block of the comparison ends too; and either of them the longer."""
    a = torch.randint(0, 2**31 - 1, (length,), dtype=torch.int32)
    for at in {0, 1, 62, 63, 64, 65, 127, 128, length - 1, length}:
        if not 0 <= at <= length:
            continue
        b = torch.cat((a, torch.tensor([7, 7], dtype=torch.int32)))
        if at < length:
            b[at] ^= 1
        expected = next((i for i in range(length) if a[i] != b[i]), length)
        assert expected == at
        assert (common(a, b), common(b, a), common(a, b[:length])) == (at, at, at)
        assert common(a[:at], b) == at


def test_views_are_compared_where_they_begin(common: Common) -> None:
    """The tree hands on the rest of a prompt."""
    a, b = torch.arange(300, dtype=torch.int32), torch.arange(10, 310, dtype=torch.int32)
    assert common(a[10:], b) == 290
    assert common(a[11:], b) == 0
