"""The seams: what the parts of an engine ask of each other. Holds no behaviour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from minisgl.core.batch import Batch
    from minisgl.core.context import Context


class KVCache(Protocol):
    """Where K and V live. `k_cache` and `v_cache` are views, [slots, local_kv_heads, head_dim] a layer."""

    page_size: int

    def k_cache(self, layer_id: int) -> Tensor: ...

    def v_cache(self, layer_id: int) -> Tensor: ...

    def store(self, layer_id: int, k: Tensor, v: Tensor, out_loc: Tensor) -> None:
        """Write k and v, [tokens, local_kv_heads, head_dim], at the slots out_loc, int32 [tokens]."""


class AttentionBackend(Protocol):
    """Attention of a batch. Holds no state of a batch: what it needs is in the metadata and the context."""

    def prepare_metadata(self, batch: Batch, page_table: Tensor) -> object:
        """Called once a step, after the page table holds the batch's new slots. Reads `batch.padded_reqs` with
        the lengths this step computes; the result must not change when the page table does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, ctx: Context) -> Tensor:
        """Store k and v, then attend causally, each token to its own request.

        q: [tokens, local_q_heads, head_dim], k and v: [tokens, local_kv_heads, head_dim]. Returns q's shape.
        """


class Communicator(Protocol):
    """What the layers that reduce need of the other ranks."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks; may work in place. Same shape."""

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """x: [rows, sizes[rank]] on each rank. Returns [rows, sum(sizes)], the same on all."""

    def minimum(self, value: int) -> int:
        """The least of what the ranks gave: memory is sized from the rank that has least."""


class NoCommunicator:
    """One rank alone: nothing to reduce, nothing to gather."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        return x

    def minimum(self, value: int) -> int:
        return value


class CacheHandle(Protocol):
    """A prefix found in a prefix cache. Its slots stay valid only while it is locked."""

    cached_len: int  # tokens, a multiple of the page size

    def slots(self) -> Tensor:
        """int32 [cached_len], on the host."""


class PrefixCache(Protocol):
    """Maps token prefixes to the slots that hold their KV. Sizes are in tokens, always whole pages."""

    evictable_size: int
    protected_size: int

    def match_prefix(self, input_ids: Tensor) -> CacheHandle:
        """The longest cached prefix of input_ids (CPU int32), in whole pages. Does not lock it."""

    def lock(self, handle: CacheHandle) -> None:
        """Its slots may not be evicted until `unlock`: lowers evictable_size, raises protected_size."""

    def unlock(self, handle: CacheHandle) -> None: ...

    def insert_prefix(self, input_ids: Tensor, slots: Tensor) -> tuple[int, CacheHandle]:
        """Add the whole pages of input_ids at slots, which it copies. Returns how many leading tokens were
        already there (the cache keeps its own slots for those) and the handle of the whole prefix, unlocked."""

    def evict(self, size: int) -> Tensor:
        """Drop at least `size` tokens, least recently used first, and return their slots (int32).
        Raises RuntimeError when fewer are evictable; nothing is dropped then."""

    def check_integrity(self) -> None:
        """Walk the whole structure; raises AssertionError naming what is wrong. For tests and idle moments."""
