"""Communicators of processes on a CPU; which one a name means; memory that is apart; NCCL's functions by name."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_processes import check_ranks
from tiny_model import make_tiny_model

from minisgl.core.config import make_config
from minisgl.models.config import ModelConfig
from minisgl.stage6 import communicators_by_name, communicators_nccl, communicators_symm
from minisgl.stage6.communicators import DistributedCommunicator, PeerLost, check_balance
from minisgl.stage6.communicators_by_name import communicator_class
from minisgl.stage6.communicators_nccl import Nccl, NcclCommunicator, UniqueId, WindowCommunicator, nccl_path
from minisgl.stage6.communicators_symm import SymmetricCommunicator
from minisgl.stage6.config import COMMUNICATORS, ParallelConfig
from minisgl.stage6.engine import check_parallel

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("what", "steps"), [("sums", 110), ("tokens", 100)])
def test_processes_add_and_choose_as_one_would(what: str, steps: int) -> None:
    check_ranks(what, "auto", "cpu", 2, steps, 100)


def test_two_extremes_take_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    others, calls = torch.tensor([-3, -9]), []

    def all_reduce(x: torch.Tensor, op: object, group: object) -> None:
        calls.append(op)
        x.copy_(torch.minimum(x, others))

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    comm = object.__new__(DistributedCommunicator)
    comm._control = object()
    assert comm.extremes(5) == (-3, 9)
    assert comm.minimum(-7) == -7
    assert calls == [torch.distributed.ReduceOp.MIN] * 2


def test_hazard_11_a_collective_that_fails_is_told_from_a_fault_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a rank that was left alone would be blamed for it."""

    def all_reduce(x: torch.Tensor, **options: object) -> None:
        raise RuntimeError("Connection closed by peer\nmore of it")

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    comm = object.__new__(DistributedCommunicator)
    comm.rank, comm._control = 3, object()
    with pytest.raises(PeerLost, match="rank 3 lost the others: Connection closed by peer$"):
        comm.minimum(5)


def test_unequal_gpus_are_refused() -> None:
    check_balance(GPU, 10 << 30, 12 << 30)
    check_balance(CPU, 1 << 30, 12 << 30)  # the same memory, seen at two moments
    with pytest.raises(ValueError, match=r"from 10\.0 to 12\.5 GiB free, more than 2 GiB apart.*CUDA_VISIBLE_DEVICES"):
        check_balance(GPU, 10 << 30, 25 << 29)


@pytest.mark.parametrize("name", [name for name in COMMUNICATORS if name != "auto"])
def test_ways_of_gpus_are_refused_on_a_cpu(tmp_path: Path, name: str) -> None:
    model = ModelConfig.from_folder(make_tiny_model(tmp_path))
    config = make_config(ParallelConfig, {"tp": 2, "device": "cpu", "comm": name})
    with pytest.raises(ValueError, match=f"--comm {name} is for ranks on GPUs.*use auto"):
        check_parallel(config, model)


@pytest.mark.parametrize("missing", [None, "no NVLink"])
def test_what_a_name_means(monkeypatch: pytest.MonkeyPatch, missing: str | None) -> None:
    monkeypatch.setattr(communicators_by_name, "why_not", lambda size: missing)
    assert communicator_class("auto", 2, CPU) is DistributedCommunicator
    assert communicator_class("nccl", 2, GPU) is DistributedCommunicator
    assert communicator_class("pynccl", 2, GPU) is NcclCommunicator
    monkeypatch.setattr(communicators_by_name, "why_no_windows", lambda: missing)
    if missing is None:
        assert communicator_class("pynccl-window", 2, GPU) is WindowCommunicator
        assert communicator_class("auto", 2, GPU) is communicator_class("symm", 2, GPU) is SymmetricCommunicator
        return
    assert communicator_class("auto", 2, GPU) is DistributedCommunicator
    for name in ("symm", "pynccl-window"):
        with pytest.raises(ValueError, match=f"--comm {name} cannot be used here: no NVLink: use --comm auto"):
            communicator_class(name, 2, GPU)


def test_ranks_agree_on_symmetric_memory_where_some_gpus_cannot_read_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPU 1 reads both others, GPUs 0 and 2 not each other: whoever made a buffer would wait for those who did not."""
    apart: set[int] = set()
    monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace(two_shot_all_reduce_out=None))  # not all torches have it
    monkeypatch.setattr(communicators_symm, "triton_runs", lambda device: True)
    monkeypatch.setattr(communicators_symm, "ONE_SHOT_MOST", {3: 1})
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda gpu, other: {gpu, other} != apart)
    assert communicators_symm.why_not(3) is None
    apart = {0, 2}
    assert communicators_symm.why_not(3) == "GPU 0 cannot read the memory of GPU 2"


def test_who_adds_up_what() -> None:
    """16 MiB are 2,048 rows of 4,096 in bfloat16."""
    plain, symmetric = object.__new__(DistributedCommunicator), object.__new__(SymmetricCommunicator)
    few, many, half = (
        torch.empty(rows, 4096, dtype=dtype, device="meta")
        for rows, dtype in ((2048, torch.bfloat16), (2056, torch.bfloat16), (8, torch.float16))
    )
    plain.device = GPU
    assert plain.by_nccl(few)
    assert [symmetric.by_nccl(x) for x in (few, many, half)] == [False, True, True]
    plain.device = CPU
    assert not plain.by_nccl(few), "gloo does"


def test_what_is_larger_than_the_window_goes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators_nccl, "WINDOW_BYTES", 64)
    memory, added = torch.empty(64, dtype=torch.uint8), []

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        added.append(x.data_ptr() == memory.data_ptr())
        return x.mul_(2)

    calls: Any = SimpleNamespace(window=lambda num_bytes: memory[:num_bytes], all_reduce=all_reduce)
    window = communicators_nccl.Window(calls)
    for shape, dtype, inside in (
        ((4, 4), torch.float32, True),
        ((3, 5), torch.bfloat16, True),
        ((17,), torch.int32, False),
    ):
        x = torch.arange(math.prod(shape), dtype=dtype).view(shape)
        expected = 2 * x
        assert window.all_reduce(x) is x, "in place"
        assert torch.equal(x, expected)
        assert added[-1] == inside


def test_functions_of_nccl_are_there() -> None:
    try:
        nccl = Nccl(nccl_path())
    except OSError:
        pytest.skip("no NCCL: torch's wheels for CPUs come without")
    assert nccl.version > 20000
    unique_id = UniqueId()
    nccl.get_unique_id(ctypes.byref(unique_id))
    assert any(unique_id.data)
