"""Stage 6's exercises, each claim in words: shares of heads, reading, summing, gathering, lock step.

They hold for the package's own code; `minisgl check 6` runs them on a learner's. No rank is a process here: what the
others would give is written down, so that nothing can wait for ever.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from wrong import equal

from minisgl.layers.embedding import VocabParallelEmbedding
from minisgl.layers.linear import LinearRowParallel
from minisgl.layers.shard import RankHeads
from minisgl.models.weights import Piece, ReadingPlan
from minisgl.stage6.communicators import DistributedCommunicator
from minisgl.stage6.inbox import LockStepInbox
from minisgl.stage6.messages import Abort, Order, Stop, encode

# 6.1 the heads of a rank


def shares(num_heads: int, num_kv_heads: int, size: int) -> list[tuple[list[int], list[int]]]:
    """(q heads, KV heads) of each rank."""
    heads = SimpleNamespace(num_heads=num_heads, num_kv_heads=num_kv_heads)
    ranks = [RankHeads(heads, rank, size) for rank in range(size)]
    return [(list(own.q()), list(own.kv())) for own in ranks]


def test_three_kv_heads_on_two_ranks() -> None:
    first, second = shares(9, 3, 2)
    assert (first[1], second[1]) == ([0, 1], [2]), (
        f"3 KV heads on 2 ranks are 2 and 1, the first rank has one more: {first[1]} and {second[1]}"
    )
    assert (first[0], second[0]) == ([0, 1, 2, 3, 4, 5], [6, 7, 8]), (
        "9 q heads are 3 groups of 3, one for each KV head: groups stay whole, so rank 0 has q heads 0 to 5; "
        f"here {first[0]} and {second[0]}"
    )


def test_more_ranks_than_kv_heads_hold_copies() -> None:
    found = shares(8, 2, 4)
    kv = [own for _, own in found]
    assert kv == [[0], [0], [1], [1]], f"2 KV heads on 4 ranks: each is held twice, by neighbours: {kv}"
    q = [own for own, _ in found]
    assert q == [[0, 1], [2, 3], [4, 5], [6, 7]], (
        f"those who share a KV head divide its 4 q heads, each on one rank only: {q}"
    )


def test_a_group_need_not_divide() -> None:
    q = [own for own, _ in shares(6, 2, 4)]
    assert q == [[0, 1], [2], [3, 4], [5]], f"3 q heads of a copied KV head are 2 and 1 on its two ranks: {q}"


def test_one_rank_has_all() -> None:
    assert shares(4, 2, 1) == [([0, 1, 2, 3], [0, 1])], "one rank alone has all heads"


def test_what_does_not_come_out_even_is_refused() -> None:
    for rank in range(4):
        try:
            held = list(RankHeads(SimpleNamespace(num_heads=9, num_kv_heads=3), rank, 4).kv())
        except ValueError:
            continue
        raise AssertionError(f"3 KV heads on 4 ranks do not come out even: a ValueError was expected, and {held} came")


# 6.2 what a rank reads

SHAPE: Any = SimpleNamespace(
    num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=7, intermediate_size=5, moe_intermediate_size=3
)
LAYER = "model.layers.0."


def parts(rank: int, prefix: str, module: str, kind: str = "weight", expert: int | None = None) -> dict[str, Piece]:
    name = f"{prefix}{module}.{kind}"
    return dict(ReadingPlan(SHAPE, rank, 2).parts(name, prefix, module, kind, expert))


def places(pieces: dict[str, Piece]) -> dict[str, tuple[list[int], int]]:
    """Last name -> (rows or columns of the checkpoint, where they begin in the parameter)."""
    return {name.split(".")[-2]: (list(piece.source), piece.offset) for name, piece in pieces.items()}


def test_q_k_and_v_lie_one_after_another() -> None:
    found = parts(1, LAYER + "self_attn.", "qkv_proj")
    assert list(found) == [f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv"], (
        f"the checkpoint has q_proj, k_proj and v_proj, each with the prefix and .weight: {list(found)}"
    )
    assert places(found) == {"q_proj": ([4, 5, 6, 7], 0), "k_proj": ([2, 3], 4), "v_proj": ([2, 3], 6)}, (
        "rank 1 of 2 has the second half of each (4 q and 2 KV heads of 2 elements); in its parameter q begins at 0, "
        f"k one after another at 4, v at 6: {places(found)}"
    )
    totals = [piece.total for piece in found.values()]
    assert totals == [8, 4, 4], (
        f"total is the checkpoint's size along dim, of all ranks together: [8, 4, 4], not {totals}"
    )


def test_gate_and_up_are_cut_each() -> None:
    found = places(parts(0, LAYER + "mlp.", "gate_up_proj"))
    assert found == {"gate_proj": ([0, 1, 2], 0), "up_proj": ([0, 1, 2], 3)}, (
        f"of 5 columns rank 0 has 3, of gate and of up: gate's at 0, up's one after another at 3: {found}"
    )


def test_a_bias_is_cut_like_its_weight() -> None:
    found = parts(1, LAYER + "self_attn.", "qkv_proj", "bias")
    assert f"{LAYER}self_attn.k_proj.bias" in found, f"kind is the end of the name, here bias: {list(found)}"
    assert found[f"{LAYER}self_attn.k_proj.bias"].offset == 4, "a bias lies as its weight's outputs do"


def test_a_row_parallel_weight_is_cut_along_its_inputs() -> None:
    (piece,) = parts(1, LAYER + "mlp.", "down_proj").values()
    assert (piece.dim, list(piece.source)) == (1, [3, 4]), (
        f"down_proj is cut along dimension 1, its inputs (SHARDING says so): {piece}"
    )


@pytest.mark.parametrize("expert", [0, 1])
def test_an_expert_is_cut_by_its_own_size(expert: int) -> None:
    found = parts(0, LAYER + f"mlp.experts.{expert}.", "gate_up_proj", expert=expert)
    assert places(found) == {"gate_proj": ([0, 1], 0), "up_proj": ([0, 1], 2)}, (
        f"expert {expert}'s intermediate size is 3 here, and the MLP's 5: cut has an argument for that; {places(found)}"
    )
    assert [piece.expert for piece in found.values()] == [expert] * 2, "a piece says which expert's it is"


class OnDisk:
    """As a slice of safetensors: it can be indexed, and counts what that reads."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.elements_read = 0

    def __getitem__(self, index: Any) -> Tensor:
        found = self._tensor[index]
        self.elements_read += found.numel()
        return found


COLUMNS = [[2, 3], [6, 7], [10, 11], [14, 15]]


@pytest.mark.parametrize(("dim", "expected"), [(0, [[8, 9, 10, 11], [12, 13, 14, 15]]), (1, COLUMNS)])
def test_only_the_slice_is_read(dim: int, expected: list[list[int]]) -> None:
    checkpoint = OnDisk(torch.arange(16).view(4, 4))
    found = Piece("p", None, dim, range(2, 4), 4, 0).read(checkpoint)
    equal(found, expected, f"2 and 3 along dimension {dim}: {'rows' if dim == 0 else 'columns'} of the checkpoint")
    assert checkpoint.elements_read == 8, (
        f"8 of 16 elements are this rank's, and {checkpoint.elements_read} were read: index before anything else"
    )


def test_a_bias_has_one_dimension() -> None:
    equal(Piece("p", None, 0, range(1, 3), 4, 0).read(OnDisk(torch.arange(4))), [1, 2], "1 and 2 of a bias")


# 6.3 row parallel


class Others:
    """A communicator: `given` is what this rank gave, and the others' terms are written down."""

    def __init__(self, rank: int, size: int, terms: float = 0.0) -> None:
        self.rank, self.size = rank, size
        self._terms = terms
        self.given: list[Tensor] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.given.append(x.clone())
        return x + self._terms

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        raise AssertionError("nothing is to be gathered here: the terms are summed, with all_reduce")

    def minimum(self, value: int) -> int:
        return value


def row_parallel(comm: Others, bias: bool) -> LinearRowParallel:
    """Two of the inputs are here."""
    layer = LinearRowParallel(2, 3, bias, comm).requires_grad_(False)
    layer.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    if layer.bias is not None:
        layer.bias.data = torch.tensor([100.0, 200.0, 300.0])
    return layer


def test_the_sum_over_ranks_comes_back() -> None:
    comm = Others(1, 2, terms=0.5)
    out = row_parallel(comm, bias=False)(torch.tensor([[1.0, 1.0], [2.0, 0.0]]))
    assert len(comm.given) == 1, f"the ranks meet once in a layer: all_reduce was called {len(comm.given)} times"
    equal(comm.given[0], [[3, 7, 11], [2, 6, 10]], "what this rank gives to the sum is the product of its own slice")
    equal(out, [[3.5, 7.5, 11.5], [2.5, 6.5, 10.5]], "what all_reduce returns is the sum over ranks: hand that on")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_bias_is_in_the_sum_once(rank: int) -> None:
    comm = Others(rank, 2)
    row_parallel(comm, bias=True)(torch.tensor([[1.0, 1.0]]))
    assert comm.given, "all_reduce was not called"
    words = (
        "rank 0 adds the bias" if rank == 0 else "rank 0 has added the bias: from rank 1 it would be in the sum again"
    )
    equal(comm.given[0], [[103, 207, 311] if rank == 0 else [3, 7, 11]], words)


# 6.4 the vocabulary's embedding


def embedding(comm: Others) -> VocabParallelEmbedding:
    """Of 7 ids: the row of id 5 is [5, 50]."""
    layer = VocabParallelEmbedding(7, 2, comm).requires_grad_(False)
    layer.weight.data = torch.tensor([[i, 10.0 * i] for i in layer.vocab_range])
    return layer


def test_a_row_that_is_here() -> None:
    comm = Others(1, 2)
    out = embedding(comm)(torch.tensor([5, 6, 4], dtype=torch.int32))
    equal(out, [[5, 50], [6, 60], [4, 40]], "rank 1 holds the rows of ids 4 to 6; id 4 is its row 0")


@pytest.mark.parametrize(("rank", "expected"), [(0, [[3, 30], [0, 0], [0, 0]]), (1, [[0, 0], [4, 40], [6, 60]])])
def test_what_is_elsewhere_is_zero(rank: int, expected: list[list[int]]) -> None:
    comm = Others(rank, 2)
    embedding(comm)(torch.tensor([3, 4, 6], dtype=torch.int32))
    assert len(comm.given) == 1, f"the ranks add up their rows: one all_reduce, not {len(comm.given)}"
    equal(comm.given[0], expected, "a row that is elsewhere adds zero: in a sum only one rank has it")


def test_the_sum_of_the_rows_comes_back() -> None:
    out = embedding(Others(0, 2, terms=0.25))(torch.tensor([1], dtype=torch.int32))
    equal(out, [[1.25, 10.25]], "what all_reduce returns is the sum over ranks: hand that on")


def test_the_ids_stay_as_they_are() -> None:
    ids = torch.tensor([3, 4, 6], dtype=torch.int32)
    embedding(Others(1, 2))(ids)
    assert ids.tolist() == [3, 4, 6], f"the ids are the batch's: they are not to be changed, and now are {ids.tolist()}"


# 6.5 gather what is cut

SHARDS = [torch.arange(8.0).view(2, 4), 100 + torch.arange(6.0).view(2, 3), 200 + torch.arange(6.0).view(2, 3)]
SIZES = [4, 3, 3]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """rank(r): its communicator. The others give their shards as they must, padded to 4 columns."""
    padded = [F.pad(shard, (0, 4 - shard.shape[1])) for shard in SHARDS]
    group = object()

    def check(shard: Tensor, where: Any) -> None:
        assert where is group, "tensors travel in the data group, group=self._data: the other is the scheduler's"
        assert shard.shape == (2, 4), (
            f"the collective wants equal shapes: all shards padded to 2 rows of 4, not {list(shard.shape)}"
        )
        assert shard.is_contiguous(), "the collective wants memory without gaps: contiguous()"

    def all_gather(outputs: list[Tensor], shard: Tensor, group: Any = None) -> None:
        check(shard, group)
        assert [out.shape for out in outputs] == [shard.shape] * 3, (
            f"the collective wants equal shapes: 3 outputs of 2 rows of 4, not {[list(out.shape) for out in outputs]}"
        )
        for out, value in zip(outputs, padded, strict=True):
            out.copy_(value)

    def all_gather_into_tensor(output: Tensor, shard: Tensor, group: Any = None) -> None:
        check(shard, group)
        output.view(3, 2, 4).copy_(torch.stack(padded))

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather_into_tensor)

    def make(number: int) -> DistributedCommunicator:
        comm = object.__new__(DistributedCommunicator)
        comm.rank, comm.size = number, 3
        comm._data, comm._control = group, object()
        return comm

    return make


@pytest.mark.parametrize("number", [0, 2])
def test_each_row_is_whole(rank: Any, number: int) -> None:
    out = rank(number).all_gather(SHARDS[number].clone(), SIZES)
    equal(
        out,
        torch.cat(SHARDS, dim=1),
        "4 + 3 + 3 columns of 2 rows: every row has its 10 columns in the order of the ranks, without the padding",
    )


def test_a_shard_may_be_a_view(rank: Any) -> None:
    transposed = SHARDS[0].t().contiguous().t()
    equal(rank(0).all_gather(transposed, SIZES), torch.cat(SHARDS, dim=1), "a shard that is a view is gathered too")


# 6.6 lock step


class Letters:
    """A mailbox that writes down what is asked of it. to_come: what arrives while someone waits."""

    def __init__(self, there: list[Order], to_come: list[Order], log: list[str]) -> None:
        self._there, self._to_come, self._log = [*map(encode, there)], [*map(encode, to_come)], log

    def __len__(self) -> int:
        return len(self._there)

    def wait(self) -> None:
        self._log.append("wait")
        assert self._there or self._to_come, "it waits, and nothing will ever come"
        if not self._there:
            self._there.append(self._to_come.pop(0))

    def take(self, count: int) -> list[bytes]:
        self._log.append(f"take {count}")
        while len(self._there) < count:
            assert self._to_come, f"{count} messages are wanted, and no more than {len(self._there)} will ever come"
            self._there.append(self._to_come.pop(0))
        taken, self._there = self._there[:count], self._there[count:]
        return taken


def inbox(there: list[Order], to_come: list[Order] = [], told: int | None = None) -> tuple[LockStepInbox, list[str]]:  # noqa: B006
    """told: what rank 0 says; None: this is rank 0."""
    log: list[str] = []

    def broadcast(value: int) -> int:
        log.append(f"broadcast {value}" if told is None else "broadcast")
        return value if told is None else told

    return LockStepInbox(Letters(there, to_come, log), broadcast, lambda: log.append("idle")), log  # type: ignore[arg-type]


A, B, C = (Abort([uid]) for uid in range(3))


def test_rank_0_says_how_many_it_has() -> None:
    box, log = inbox([A, B])
    assert box.receive(False) == [A, B], "rank 0 has two messages, and takes two"
    assert log == ["broadcast 2", "take 2"], f"rank 0 broadcasts how many it has, 2, and takes them: {log}"


@pytest.mark.parametrize(("there", "to_come"), [([A, B, C], []), ([A], [B, C]), ([], [A, B, C])])
def test_all_take_as_many_as_rank_0(there: list[Order], to_come: list[Order]) -> None:
    box, _ = inbox(there, to_come, told=2)
    orders = box.receive(False)
    assert orders == [A, B], (
        f"rank 0 said 2, and here {len(there)} were there: take 2 as rank 0 does, now or when they come; {orders}"
    )


def test_nothing_there_is_no_reason_to_stop() -> None:
    box, log = inbox([])
    assert box.receive(False) == [], "no message has come: an empty list, and the loop goes on with its work"
    assert "broadcast 0" in log, "rank 0 says 0 too: the others wait for its word before every step"
    assert not {"idle", "wait"} & set(log), f"blocking is False, there is work: no wait, and not idle: {log}"


def test_who_has_nothing_to_do_waits_first() -> None:
    box, log = inbox([], [A])
    orders = box.receive(True)
    assert log == ["idle", "wait", "broadcast 1", "take 1"], (
        f"nothing there and nothing to do: say idle, wait at the own mailbox, and only then broadcast: {log}"
    )
    assert orders == [A], f"the message that ends the wait is taken, and {orders} came"


def test_who_has_mail_is_not_idle() -> None:
    box, log = inbox([A])
    box.receive(True)
    assert "idle" not in log, f"a message is there already: nobody is to be told that the rank is idle; {log}"


@pytest.mark.parametrize("there", [[Stop()], [A, Stop()]])
def test_stop_among_the_orders_ends_the_loop(there: list[Order]) -> None:
    orders = inbox(there)[0].receive(False)
    assert orders is None, f"a Stop is among the orders: None ends the loop, and {orders} came"
