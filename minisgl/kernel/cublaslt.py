"""x Wᵀ in bfloat16 by cuBLASLt, with a configuration that the caller names. Knows no layer, and not which one is best.

torch's products come from the same library, which has a rule for every shape: of thousands of configurations (how a
result is cut into tiles, how many multiprocessors share what they read) it takes one. Through ctypes any of them can be
asked for; torch has the library loaded already, and no compiler is needed. Numbers are those of NVIDIA's cublasLt.h.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BFLOAT16, _SUMS_IN_FLOAT32, _FLOAT32, _TRANSPOSE_FIRST = 14, 68, 0, 3
_ONE, _ZERO = c_float(1), c_float(0)


class Configuration(NamedTuple):
    """Which kernel: the fields of CUBLASLT_ALGO_CONFIG that tell those of a Hopper GPU apart."""

    algorithm: int
    stages: int
    tile: int
    cluster: int
    option: int


_FIELDS = {"stages": (6, c_uint32), "tile": (1, c_uint32), "cluster": (8, c_uint16), "option": (5, c_uint32)}


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Result(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@cache
def library() -> Any:
    """The one that torch has loaded, or None."""
    for name in ("libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
        except OSError:
            continue
    return None


@cache
def version() -> int:
    """Such as 130100; 0 where torch has no such library. Another version may give a configuration another meaning."""
    if library() is None:
        return 0
    library().cublasLtGetVersion.restype = c_size_t
    return int(library().cublasLtGetVersion())


class Product:
    """x Wᵀ, of these sizes, on this device. Lives as long as the process, as do the descriptions it holds."""

    def __init__(self, rows: int, outputs: int, inputs: int, device: torch.device) -> None:
        self.rows, self.outputs, self.device = rows, outputs, device
        self._handle = _handle(device)
        # The library stores by columns: its A, [inputs, outputs], is W, its B, [inputs, rows], is x, its D the result.
        self._operation = _make("cublasLtMatmulDescCreate", _SUMS_IN_FLOAT32, _FLOAT32)
        _call("cublasLtMatmulDescSetAttribute", self._operation, _TRANSPOSE_FIRST, byref(c_int(1)), c_size_t(4))
        self._layouts = [_layout(inputs, outputs), _layout(inputs, rows), _layout(outputs, rows)]

    def offered(self, most: int = 64) -> list[Configuration]:
        """What the library's own rule offers that needs no further memory, its first choice first."""
        preference, found, results = _make("cublasLtMatmulPreferenceCreate"), c_int(), (_Result * most)()
        a, b, d = self._layouts
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle, self._operation, a, b, d, d, preference, most, results, byref(found),
        )  # fmt: skip
        return [_configuration(result.algorithm) for result in results[: found.value] if result.state == 0]

    def tiles(self, like: Configuration) -> list[int]:
        """Those that this algorithm may have, for some sizes."""
        return _capabilities(self._algorithm(like), 6, 1024)

    def options(self, like: Configuration) -> range:
        return range(_capabilities(self._algorithm(like), 7, 1)[0] + 1)

    def plan(self, configuration: Configuration) -> Plan | None:
        """None if the library has no such kernel for these sizes, or one that needs further memory."""
        algorithm, result = self._algorithm(configuration), _Result()
        a, b, d = self._layouts
        check = library().cublasLtMatmulAlgoCheck
        status = check(self._handle, self._operation, a, b, d, d, byref(algorithm), byref(result))
        return Plan(self, algorithm) if status == 0 and result.workspace == 0 else None

    def _algorithm(self, configuration: Configuration) -> _Algorithm:
        algorithm = _Algorithm.from_buffer_copy(_initial(self._handle.value, configuration.algorithm))
        for name, (field, kind) in _FIELDS.items():
            value = kind(getattr(configuration, name))
            size = c_size_t(ctypes.sizeof(kind))
            library().cublasLtMatmulAlgoConfigSetAttribute(byref(algorithm), field, byref(value), size)
        return algorithm

    def run(self, x: Tensor, weight: Tensor, algorithm: _Algorithm) -> Tensor:
        out = torch.empty((self.rows, self.outputs), dtype=x.dtype, device=x.device)
        a, b, d = self._layouts
        at = c_void_p(out.data_ptr())
        _call(
            "cublasLtMatmul", self._handle, self._operation,
            byref(_ONE), c_void_p(weight.data_ptr()), a, c_void_p(x.data_ptr()), b, byref(_ZERO), at, d, at, d,
            byref(algorithm), None, c_size_t(0), c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )  # fmt: skip
        return out


class Plan(NamedTuple):
    product: Product
    algorithm: _Algorithm

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: [rows, inputs]; weight: [outputs, inputs]; both contiguous, bfloat16, from a multiple of 16 bytes on.
        Returns [rows, outputs]."""
        return self.product.run(x, weight, self.algorithm)


def _call(name: str, *arguments: Any) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} of cuBLASLt {version()} gave status {status}; cublasLt.h says what it means")


def _make(name: str, *arguments: Any) -> c_void_p:
    made = c_void_p()
    _call(name, byref(made), *arguments)
    return made


def _layout(rows: int, columns: int) -> c_void_p:
    return _make("cublasLtMatrixLayoutCreate", _BFLOAT16, c_uint64(rows), c_uint64(columns), c_int64(rows))


@cache
def _initial(handle: int, algorithm: int) -> _Algorithm:
    initial, kinds = _Algorithm(), (_SUMS_IN_FLOAT32, _FLOAT32, *4 * (_BFLOAT16,))
    _call("cublasLtMatmulAlgoInit", c_void_p(handle), *kinds, algorithm, byref(initial))
    return initial


@cache
def _handle(device: torch.device) -> c_void_p:
    with torch.cuda.device(device):
        return _make("cublasLtCreate")


def _configuration(algorithm: _Algorithm) -> Configuration:
    values = {}
    for name, (field, kind) in {"algorithm": (0, c_int32), **_FIELDS}.items():
        value, written = kind(), c_size_t()
        size = c_size_t(ctypes.sizeof(kind))
        _call("cublasLtMatmulAlgoConfigGetAttribute", byref(algorithm), field, byref(value), size, byref(written))
        values[name] = value.value
    return Configuration(**values)


def _capabilities(algorithm: _Algorithm, which: int, most: int) -> list[int]:
    values, written = (c_uint32 * most)(), c_size_t()
    size = c_size_t(ctypes.sizeof(values))
    _call("cublasLtMatmulAlgoCapGetAttribute", byref(algorithm), which, values, size, byref(written))
    return list(values)[: written.value // 4]
