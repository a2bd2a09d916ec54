"""NCCL called by ourselves, on the current stream. Knows nothing of torch's process groups but how to pass an id on.

torch runs NCCL on a stream of its own, with events before and after; here a call is one kernel on the stream of the
layers, which a CUDA graph records like any other. The library is the one torch has loaded, by ctypes. mini-sglang's
and vLLM's PyNCCL are the same idea.

A window is a buffer that all ranks have registered with each other (NCCL 2.27). For what is in one NCCL has kernels
that read the peers' memory at once, in place of its rings; mini-sglang sums in one (the walk-through's 4.7.5). NCCL
also binds windows to NVLink multicast objects, unless NCCL_NVLS_ENABLE=0 says not to. So windows are never automatic.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.stage6 import communicators
from minisgl.stage6.communicators import DistributedCommunicator

ID_BYTES = 128
_DTYPES = {  # ncclDataType_t
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_SUM = 0  # ncclRedOp_t
WINDOWS_SINCE = 22700  # NCCL 2.27.0
_COLL_SYMMETRIC = 1  # a window's flag: every rank has it, at the same offset of its own
WINDOW_BYTES = 16 << 20  # 2048 rows of 4096 in bfloat16: what is larger is limited by the links, whatever the kernel


class UniqueId(ctypes.Structure):
    """What the ranks of one communicator have in common."""

    _fields_ = [("data", ctypes.c_ubyte * ID_BYTES)]


class NcclError(RuntimeError):
    pass


class Nccl:
    """The functions of libnccl that are used here."""

    def __init__(self, path: str) -> None:
        """Raises OSError when there is no library at the path (or of the name)."""
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._library = ctypes.CDLL(path)
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self.get_version = self._function("ncclGetVersion", ctypes.POINTER(number))
        self.get_unique_id = self._function("ncclGetUniqueId", ctypes.POINTER(UniqueId))
        self.init_rank = self._function("ncclCommInitRank", ctypes.POINTER(pointer), number, UniqueId, number)
        self.all_reduce = self._function("ncclAllReduce", pointer, pointer, size, number, number, pointer, pointer)
        self.all_gather = self._function("ncclAllGather", pointer, pointer, size, number, pointer, pointer)
        version = number()
        self.get_version(ctypes.byref(version))
        self.version = version.value
        if self.version >= WINDOWS_SINCE:
            self.mem_alloc = self._function("ncclMemAlloc", ctypes.POINTER(pointer), size)
            out = ctypes.POINTER(pointer)
            self.window_register = self._function("ncclCommWindowRegister", pointer, pointer, size, out, number)

    def _function(self, name: str, *types: type) -> Callable[..., None]:
        function = getattr(self._library, name)
        function.argtypes = list(types)

        def call(*args: object) -> None:
            status = function(*args)
            if status:
                raise NcclError(f"{name}: {self._library.ncclGetErrorString(status).decode()}")

        return call


def nccl_path() -> str:
    """That of torch's own wheel if it came with one, else the name by which the loader finds a library."""
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders if (path := Path(folder) / "lib" / "libnccl.so.2").exists()]
    return str(found[0]) if found else "libnccl.so.2"


class NcclCalls:
    """A communicator of NCCL's, and its calls on the current stream. It is never destroyed: NCCL would wait for the
    CUDA graphs that have its calls, and the process ends soon after."""

    def __init__(self, ranks: DistributedCommunicator) -> None:
        """ranks: those that take part, all of which must come; they tell each other rank 0's id."""
        self._nccl, self._device = Nccl(nccl_path()), ranks.device
        unique_id = UniqueId()
        if ranks.rank == 0:
            self._nccl.get_unique_id(ctypes.byref(unique_id))
        told = torch.tensor(list(unique_id.data), dtype=torch.uint8)
        ranks.broadcast_tensor(told)
        ctypes.memmove(unique_id.data, bytes(told.tolist()), ID_BYTES)
        self._comm = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._nccl.init_rank(ctypes.byref(self._comm), ranks.size, unique_id, ranks.rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place if x has no gaps."""
        x = x.contiguous()
        dtype = _DTYPES[x.dtype]
        self._nccl.all_reduce(x.data_ptr(), x.data_ptr(), x.numel(), dtype, _SUM, self._comm, self._stream())
        return x

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """x: [rows, columns] of each of `size` ranks. Returns [size, rows, columns]."""
        x = x.contiguous()
        shards = x.new_empty(size, *x.shape)
        dtype = _DTYPES[x.dtype]
        self._nccl.all_gather(x.data_ptr(), shards.data_ptr(), x.numel(), dtype, self._comm, self._stream())
        return shards

    def window(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], never freed. All ranks must call it."""
        memory, window = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._nccl.mem_alloc(ctypes.byref(memory), num_bytes)
            self._nccl.window_register(self._comm, memory, num_bytes, ctypes.byref(window), _COLL_SYMMETRIC)
        return torch.as_tensor(_Memory(memory.value or 0, num_bytes), device=self._device)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


class _Memory:
    """What torch makes a tensor of, without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        shape, data = (num_bytes,), (address, False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": data, "version": 2}


class NcclCommunicator(DistributedCommunicator):
    """Sums and gathers by NCCL on the current stream."""

    def connect(self) -> None:
        self._calls = NcclCalls(self)

    def sum(self, x: Tensor) -> Tensor:
        return self._calls.all_reduce(x)

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        if DistributedCommunicator.all_gather.__module__ != communicators.__name__:  # a learner's is to be called
            return super().all_gather(x, sizes)
        widest = max(sizes)
        padded = F.pad(x, (0, widest - x.shape[1])) if x.shape[1] < widest else x
        shards = self._calls.all_gather(padded, self.size)  # [ranks, rows, widest]
        if min(sizes) == widest:
            return shards.transpose(0, 1).reshape(len(x), -1)
        return torch.cat([shard[:, :size] for shard, size in zip(shards, sizes, strict=True)], dim=1)


class Window:
    """A buffer that NCCL knows on all ranks, and sums by way of it."""

    def __init__(self, calls: NcclCalls) -> None:
        """All ranks must make one."""
        self._calls, self._memory = calls, calls.window(WINDOW_BYTES)

    def all_reduce(self, x: Tensor) -> Tensor:
        """As `NcclCalls.all_reduce`, with copies in and out; what is larger than the window goes as it is."""
        if x.nbytes > WINDOW_BYTES:
            return self._calls.all_reduce(x)
        inside = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        inside.copy_(x)
        return x.copy_(self._calls.all_reduce(inside))


class WindowCommunicator(NcclCommunicator):
    """Sums in a window; all else as its base does."""

    def connect(self) -> None:
        super().connect()
        self._window = Window(self._calls)

    def sum(self, x: Tensor) -> Tensor:
        return self._window.all_reduce(x)


def why_no_windows() -> str | None:
    """None: this NCCL has them."""
    version = Nccl(nccl_path()).version
    return None if version >= WINDOWS_SINCE else f"windows came with NCCL 2.27, and this one's version is {version}"
