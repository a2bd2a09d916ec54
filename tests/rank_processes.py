"""Ranks that are processes, each of which checks its communicator for many steps and exits with 1 if it was wrong.

`check_ranks("sums", "symm", ...)` runs this file once a rank. What the ranks should find is made from seeds, on each of
them, so the reference has been through no collective.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.layers.shard import shard_range, shard_sizes
from minisgl.sampling.sampler import Sampler
from minisgl.sampling.vocab_parallel import VocabParallelSampler
from minisgl.stage6.communicators import DistributedCommunicator, rank_device
from minisgl.stage6.communicators_by_name import make_communicator
from minisgl.stage6.rank_main import end_process

VOCAB = 49_999  # no multiple of 2: the shards differ
COLUMNS = 576


def sums(comm: DistributedCommunicator, steps: int) -> None:
    """Small integers, whose sum is exact in any order and in bfloat16. On a GPU every other step replays a graph."""
    mostly = torch.bfloat16, torch.float32
    shapes = [(rows, dtype) for rows in (1, 3, 64, 257, 2048) for dtype in mostly] + [(5, torch.float16)]
    if comm.device.type == "cuda":
        shapes.append((14_000, torch.bfloat16))  # nearly 16 MiB
    places = [torch.zeros(rows, COLUMNS, dtype=dtype, device=comm.device) for rows, dtype in shapes]
    replays = [graph_of(comm.all_reduce, place) for place in places]
    wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
    for step in range(steps):
        which = step % len(shapes)
        place = places[which]
        terms = [integers(place, 1000 * step + rank) for rank in range(comm.size)]
        place.copy_(terms[comm.rank])
        out = replays[which]() if step // len(shapes) % 2 else comm.all_reduce(place)
        wrong += (out != sum(terms)).sum()
        check(wrong, step)
    check(wrong, 0)
    x = torch.randn(64, COLUMNS, device=comm.device, generator=generator(comm.device, comm.rank)).to(torch.bfloat16)
    bits = comm.all_reduce(x).view(1, -1)
    of_ranks = comm.all_gather(bits, [bits.numel()] * comm.size).view(comm.size, -1)
    assert torch.equal(of_ranks, of_ranks[:1].expand_as(of_ranks)), "a sum that was rounded differs between ranks"


def tokens(comm: DistributedCommunicator, steps: int) -> None:
    """Greedy, drawn and filtered rows from this rank's columns, beside a sampler that has all."""
    kinds = [
        [SamplingParams()] * 4,
        [SamplingParams(temperature=0.6, seed=seed) for seed in range(4)],
        [SamplingParams(temperature=1.0, seed=1), SamplingParams(), SamplingParams(temperature=2.0, seed=2)],
        [SamplingParams(temperature=0.8, seed=1, top_p=0.9), SamplingParams()],
    ]
    fused = comm.device.type == "cuda"
    ours = VocabParallelSampler(VOCAB, comm.device, fused, comm)
    whole = Sampler(VOCAB, comm.device, fused)
    own, sizes = shard_range(VOCAB, comm.rank, comm.size), shard_sizes(VOCAB, comm.size)
    wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
    for step in range(steps):
        params = kinds[step % len(kinds)] if step % 25 == 0 else kinds[step % 3]
        logits = torch.randn(len(params), VOCAB, device=comm.device, generator=generator(comm.device, step)) * 3
        logits = logits.to(torch.bfloat16)
        args = whole.prepare([Req(i, torch.zeros(1 + i + step % 50), p, i) for i, p in enumerate(params)])
        shard = logits[:, own.start : own.stop].contiguous()
        wrong += (comm.all_gather(shard, sizes) != logits).sum()
        wrong += (ours.sample(shard, args) != whole.sample(logits, args)).sum()
        check(wrong, step)
    check(wrong, 0)


def graph_of(call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """What repeats the call: a CUDA graph, or on a CPU the call."""
    if x.device.type != "cuda":
        return lambda: call(x)
    call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def integers(like: Tensor, seed: int) -> Tensor:
    made = torch.randint(-60, 61, like.shape, device=like.device, generator=generator(like.device, seed))
    return made.to(like.dtype)


def check(wrong: Tensor, step: int) -> None:
    """Now and then, since it waits for the device."""
    if step % 200 == 0 and int(wrong):
        raise SystemExit(f"{int(wrong)} values are wrong by step {step}")


def check_ranks(what: str, name: str, device: str, size: int, steps: int, timeout: float) -> None:
    """Fails with what the ranks said, or when they are not done after `timeout` seconds; none is left."""
    with tempfile.TemporaryDirectory() as folder:
        words = [what, name, device, str(size), str(steps), str(Path(folder) / "meet")]
        ranks = [
            subprocess.Popen([sys.executable, __file__, *words, str(rank)], stderr=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and {rank.poll() for rank in ranks} <= {None, 0}:
            if not any(rank.poll() is None for rank in ranks):
                break
            time.sleep(0.05)
        late = [rank.pid for rank in ranks if rank.poll() is None]
        for rank in ranks:
            rank.kill()
        said = [rank.communicate()[1] for rank in ranks]
    status = [rank.returncode for rank in ranks]
    assert status == [0] * size, f"{what} by {name}: exit statuses {status}, late {late}\n" + "\n".join(said)


def main(what: str, name: str, device: str, size: int, steps: int, meet: str, rank: int) -> None:
    torch.set_num_threads(1)
    comm = make_communicator(name, rank, size, rank_device(device, rank), Path(meet))
    with torch.inference_mode():
        {"sums": sums, "tokens": tokens}[what](comm, steps)
    comm.barrier()
    comm.close()
    end_process(0)


if __name__ == "__main__":
    what, name, device, size, steps, meet, rank = sys.argv[1:]
    main(what, name, device, int(size), int(steps), meet, int(rank))
