"""Which device and dtype to run on, what memory it has, and copies that do not wait. Knows nothing of models."""

from __future__ import annotations

import gc
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minisgl.core.batch import DeviceEvent

log = logging.getLogger("minisgl")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 (AVX-512, AMX) and Arm, as /proc/cpuinfo spells them
_CPU_POOL_SHARE, _CPU_POOL_CAP = 0.25, 4 << 30  # bytes: two servers fit in 16 GB


def resolve_device(name: str) -> torch.device:
    """ "auto" is the GPU if there is one. On GPUs: the current one, so a rank calls torch.cuda.set_device first."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, not {name!r:.80}")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} " + ("sees none" if torch.version.cuda else "is a build for CPUs only")
        raise ValueError(f"device cuda was asked for, but there is no usable GPU ({built}): use --device cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 where the hardware multiplies it natively, else float32. What it is goes to the log."""
    if name != "auto" and name not in _DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(_DTYPES)}, not {name!r:.80}")
    if name != "auto":
        log.info("%s on %s", name, device)
        return _DTYPES[name]
    native = torch.cuda.get_device_capability(device) >= (8, 0) if device.type == "cuda" else _cpu_has_bf16()
    chosen, why = ("bfloat16", "it has") if native else ("float32", "it lacks")
    log.info("%s on %s (auto: %s native bfloat16)", chosen, device, why)
    return _DTYPES[chosen]


def prefill_length(device: torch.device) -> int:
    """Tokens of a step when nobody says how many. On a CPU a step of 2048 stops all running requests for seconds, and
    more tokens a second come out of it no more than of 256 (dev/LOG.md, "the scheduler's settings")."""
    return 256 if device.type == "cpu" else 2048


def _cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Linux says so in /proc/cpuinfo. Elsewhere no: torch's kernels for macOS emulate bfloat16."""
    if not cpuinfo.exists():
        return False
    return any(
        not _BF16_FLAGS.isdisjoint(line.split())
        for line in cpuinfo.read_text().splitlines()
        if line.startswith(("flags", "Features"))
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken. On a CPU: available RAM, or what a container leaves of it if that is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():  # macOS does not say what is available: half of all there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return min([int(fields["MemAvailable"].split()[0]) * 1024, *_cgroup_free()])


def release_memory() -> None:
    """What nobody uses any more goes back to the GPU, where the next engine or process looks for free memory."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _cgroup_free(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes left to a container with a memory limit (cgroup v2), or nothing when there is none."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except OSError:
        return []
    reclaimable = int(stat.get("inactive_file", 0))  # page cache: the kernel drops it when asked for memory
    return [] if limit == "max" else [max(0, int(limit) - used + reclaimable)]


def pool_terms(device: torch.device, memory_ratio: float, free_before: int, model_bytes: int) -> tuple[float, int, int]:
    """(ratio, free, model) of the KV pool's budget, ratio * free - model bytes. A GPU is ours alone; a CPU's memory
    is shared, so there it is a quarter of what is available, 4 GiB at most, and the model is not counted."""
    if device.type == "cuda":
        return memory_ratio, free_before, model_bytes
    return _CPU_POOL_SHARE, min(free_before, int(_CPU_POOL_CAP / _CPU_POOL_SHARE)), 0


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory. On a CPU the system zeroes a page when it is first touched, so that 4 GiB cost nothing at start
    (torch.zeros writes them all: 3.4 s) and an idle server does not hold what it has not used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def device_tensor(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[len(values)] on the device, as `to_device`."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; on a CPU the tensor itself. The host does not wait: a GPU copies from pinned memory."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class DoneEvent:
    """The event of a device that has no queue: all that was asked of it has been done."""

    def synchronize(self) -> None:
        return


def host_copy(tensor: Tensor) -> tuple[Tensor, DeviceEvent]:
    """The tensor on the host, and the event after which it may be read. On a CPU it is the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor, DoneEvent()
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))
    return host, copied
