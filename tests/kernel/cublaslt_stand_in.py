"""cuBLASLt where there is no GPU: the functions that we call, with the types of NVIDIA's cublasLt.h, on the CPU.

It knows matrices as the library does, by columns, and keeps what it was told, so that an argument in another's place
gives another product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

POINTER = (c_void_p, type(ctypes.byref(c_int32())), ctypes.Array, type(None))
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasLtMatmulDescCreate": (POINTER, int, int),
    "cublasLtMatmulDescSetAttribute": (POINTER, int, POINTER, c_size_t),
    "cublasLtMatrixLayoutCreate": (POINTER, int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulPreferenceCreate": (POINTER,),
    "cublasLtMatmulAlgoGetHeuristic": (*7 * (POINTER,), int, POINTER, POINTER),
    "cublasLtMatmulAlgoInit": (POINTER, int, int, int, int, int, int, int, POINTER),
    "cublasLtMatmulAlgoCheck": 8 * (POINTER,),
    "cublasLtMatmulAlgoConfigSetAttribute": (POINTER, int, POINTER, c_size_t),
    "cublasLtMatmulAlgoConfigGetAttribute": (POINTER, int, POINTER, c_size_t, POINTER),
    "cublasLtMatmulAlgoCapGetAttribute": (POINTER, int, POINTER, c_size_t, POINTER),
    "cublasLtMatmul": (*14 * (POINTER,), c_size_t, POINTER),
}
CONFIG_TYPES = (c_int32, c_uint32, c_int32, c_uint32, c_uint32, c_uint32, c_uint32, c_uint16, c_uint16)
"""Of CUBLASLT_ALGO_CONFIG_ID (0), TILE_ID, SPLITK_NUM, REDUCTION_SCHEME, CTA_SWIZZLING, CUSTOM_OPTION, STAGES_ID,
INNER_SHAPE_ID and CLUSTER_SHAPE_ID (8)."""
TILE_IDS, CUSTOM_OPTION_MAX = 6, 7
BFLOAT16, FLOAT32, COMPUTE_32F, TRANSA, OP_T = 14, 0, 68, 3, 1
INVALID_VALUE, NOT_SUPPORTED = 7, 15


class StandIn:
    """Algorithm 66 has tiles 1, 2 and 5 and options 0 to 3; tiles 2 and 5 want further memory."""

    def __init__(self, offers: list[dict[int, int]]) -> None:
        """offers: values of fields, by their numbers, of each configuration that the rule gives."""
        self.offers, self.ran, self.streams = offers, [], []
        self._things: list[Any] = [None]

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        types = SIGNATURES[name]
        assert len(arguments) == len(types), f"{name} takes {len(types)} arguments"
        for place, (argument, kind) in enumerate(zip(arguments, types, strict=True)):
            assert isinstance(argument, kind), f"argument {place} of {name} is {argument!r}"
        return getattr(self, f"_{name.removeprefix('cublasLt')}")(*arguments) or 0

    def _keep(self, where: Any, thing: Any) -> None:
        self._things.append(thing)
        where._obj.value = len(self._things) - 1

    def _thing(self, pointer: c_void_p) -> Any:
        return self._things[pointer.value or 0]

    def _MatmulDescCreate(self, where: Any, compute: int, scale: int) -> None:
        assert (compute, scale) == (COMPUTE_32F, FLOAT32)
        self._keep(where, {})

    def _MatmulDescSetAttribute(self, description: c_void_p, which: int, value: Any, size: c_size_t) -> None:
        assert size.value == 4
        self._thing(description)[which] = value._obj.value

    def _MatrixLayoutCreate(self, where: Any, kind: int, rows: c_uint64, columns: c_uint64, apart: c_int64) -> None:
        assert kind == BFLOAT16
        self._keep(where, (rows.value, columns.value, apart.value))

    def _MatmulPreferenceCreate(self, where: Any) -> None:
        self._keep(where, "no further memory")

    def _MatmulAlgoInit(self, handle: c_void_p, compute: int, scale: int, *rest: Any) -> int:
        *kinds, number, algorithm = rest
        assert (compute, scale, kinds) == (COMPUTE_32F, FLOAT32, 4 * [BFLOAT16])
        algorithm._obj.data[0] = number
        return 0 if number == 66 else INVALID_VALUE

    def _MatmulAlgoConfigSetAttribute(self, algorithm: Any, field: int, value: Any, size: c_size_t) -> None:
        assert type(value._obj) is CONFIG_TYPES[field]
        assert size.value == ctypes.sizeof(CONFIG_TYPES[field])
        fields(algorithm)[field] = value._obj.value

    def _MatmulAlgoConfigGetAttribute(self, algorithm: Any, field: int, value: Any, size: c_size_t, _: Any) -> None:
        assert size.value == ctypes.sizeof(CONFIG_TYPES[field])
        value._obj.value = fields(algorithm)[field]

    def _MatmulAlgoCapGetAttribute(self, algorithm: Any, which: int, values: Any, size: c_size_t, written: Any) -> None:
        found = {TILE_IDS: [1, 2, 5], CUSTOM_OPTION_MAX: [3]}[which]
        assert size.value == ctypes.sizeof(values) >= 4 * len(found)
        values[: len(found)] = found
        written._obj.value = 4 * len(found)

    def _MatmulAlgoGetHeuristic(self, handle: c_void_p, *rest: Any) -> None:
        _, _, _, _, _, preference, most, results, found = rest
        assert self._thing(preference) == "no further memory"
        for result, offer in zip(results, self.offers[:most], strict=False):
            for field, value in offer.items():
                fields(ctypes.byref(result.algorithm))[field] = value
        found._obj.value = min(most, len(self.offers))

    def _MatmulAlgoCheck(self, handle: c_void_p, *rest: Any) -> int:
        *_, algorithm, result = rest
        tile = fields(algorithm)[1]
        result._obj.workspace = 1024 * (tile in (2, 5))
        return 0 if tile in (1, 2, 5) else NOT_SUPPORTED

    def _Matmul(self, handle: c_void_p, description: c_void_p, alpha: Any, *rest: Any) -> None:
        a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace, size, stream = rest
        assert self._thing(description) == {TRANSA: OP_T}
        assert (alpha._obj.value, beta._obj.value, type(alpha._obj), workspace, size.value) == (1, 0, c_float, None, 0)
        assert (c.value, c_layout.value) == (d.value, d_layout.value)
        first, second = (by_columns(p, self._thing(layout)) for p, layout in ((a, a_layout), (b, b_layout)))
        by_columns(d, self._thing(d_layout)).copy_((first.float().T @ second.float()).bfloat16())
        self.ran.append(list(fields(algorithm)))
        self.streams.append(stream.value)


def fields(algorithm: Any) -> Any:
    """The nine of a configuration lie in the 64 bytes of an algorithm."""
    return (c_uint32 * 9).from_buffer(algorithm._obj)


def by_columns(pointer: c_void_p, layout: tuple[int, int, int]) -> Tensor:
    """[rows, columns], a view of what lies there."""
    rows, columns, apart = layout
    values = (ctypes.c_uint16 * (apart * columns)).from_address(pointer.value or 0)
    return torch.frombuffer(values, dtype=torch.bfloat16).view(columns, apart)[:, :rows].T
