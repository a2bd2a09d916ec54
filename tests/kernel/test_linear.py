"""A product in halves: their sum is the product."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel.linear import linear_in_halves


def test_the_halves_add_up() -> None:
    x, weight = torch.randn(5, 64), torch.randn(7, 64)
    found = linear_in_halves(x, weight)
    assert found.shape == (2, 5, 7)
    torch.testing.assert_close(found.sum(0), x @ weight.T)
    torch.testing.assert_close(found[0], x[:, :32] @ weight[:, :32].T)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [113, 200, 256])
def test_on_a_gpu_as_near_as_the_whole(rows: int) -> None:
    x, weight = (torch.randn(n, 4096, dtype=torch.bfloat16, device="cuda") for n in (rows, 1024))
    expected = x.double() @ weight.double().T
    found = linear_in_halves(x, weight / 64).double().sum(0) * 64
    assert float((found - expected).norm() / expected.norm()) < 4e-3
