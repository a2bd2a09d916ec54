"""Says what is wrong with a learner's tensor: what was expected, what came, and the words of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3}


def equal(came: Any, expected: Any, words: str) -> None:
    """Shape and values. Raises AssertionError with the words, both values, and the places that differ."""
    if not isinstance(came, Tensor):
        raise AssertionError(f"a tensor is wanted, and {type(came).__name__} came: {came!r:.80}. {words}")
    wanted = torch.as_tensor(expected)
    if came.shape != wanted.shape:
        raise AssertionError(f"the shape is {list(came.shape)} and not {list(wanted.shape)}. {words}")
    tolerance = TOLERANCE.get(came.dtype, 1e-4)
    same = torch.isclose(came.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=False)
    if not bool(same.all()):
        raise AssertionError(f"{words}\nexpected {short(wanted)}\ncame     {short(came)}")


def refused(words: str, act: Callable[..., Any], *args: Any) -> None:
    """The call raises RuntimeError. Raises AssertionError with the words if it does not."""
    try:
        act(*args)
    except RuntimeError:
        return
    raise AssertionError(f"{words}: a RuntimeError was expected, and none was raised")


def short(tensor: Tensor) -> str:
    """All of a small tensor, the beginning of another."""
    values = tensor.flatten()[:12].tolist()
    numbers = ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
    more = " …" if tensor.numel() > 12 else ""
    return f"[{numbers}{more}]" + (f" of shape {list(tensor.shape)}" if tensor.dim() > 1 else "")
