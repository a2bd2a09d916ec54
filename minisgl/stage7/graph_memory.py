"""How much memory recorded graphs will take, counted before the KV cache pool takes the rest. Asks no device.

An estimate. Graphs share one memory, so of their activations only the largest step's count, once of each kind: steps
with prompts are recorded last, and are too large for what decode steps left.
"""

from __future__ import annotations

from typing import NamedTuple

from minisgl.layers.shard import RankHeads, shard_range
from minisgl.models.config import ModelConfig
from minisgl.stage7.step_graphs import MOST_PROMPTS

# Bytes that no size tells: what a graph's few hundred launches are for the driver; once, libraries' workspaces on the
# stream that records, and the end of each block of memory that is taken from the device; and what NCCL takes for being
# recorded. Fitted by hand to runs on H200s (2026-11-30, torch 2.11): Llama-3.1-8B with 11 and 35 sizes of decode steps,
# on one GPU, and on two through symmetric memory; on two through NCCL with 11; Qwen3-0.6B and Qwen3-30B-A3B with 35.
# All took less than is counted, by less than 0.15 GiB. The one through NCCL took 0.12 GiB more than its like.
_A_GRAPH, _ONCE, _NCCL = 1 << 20, 288 << 20, 128 << 20
_NUMBERS = 24  # bytes of a token's id, position, slot, and the index of its row


class GraphMemory(NamedTuple):
    """Bytes."""

    activations: int = 0
    buffers: int = 0  # what a step is copied into
    graphs: int = 0
    once: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        activations, buffers, graphs, once = (part / 2**30 for part in self)
        return (
            f"{self.total / 2**30:.2f} counted: activations {activations:.2f}, buffers {buffers:.2f}, "
            f"graphs {graphs:.2f}, workspaces {once:.2f}"
        )


def graph_memory(
    model: ModelConfig,
    share: tuple[int, int],
    itemsize: int,
    pages_a_row: int,
    decode: list[int],
    steps: list[int],
    nccl: bool = False,
) -> GraphMemory:
    """share: rank, of how many. itemsize: bytes of an activation. pages_a_row: of the page table. decode, steps: sizes
    to record, in rows and in tokens, descending; none of the first, and there are no graphs. nccl: it adds up what the
    ranks have, in some of them."""
    if not decode:
        return GraphMemory()
    tokens = decode[0] + sum(steps[:1])
    rows = decode[0] + (decode[0] + MOST_PROMPTS if steps else 0)
    return GraphMemory(
        activations=tokens * layer_numbers(model, *share) * itemsize,
        buffers=tokens * _NUMBERS + rows * (model.hidden_size * itemsize + pages_a_row * 4),
        graphs=(len(decode) + len(steps)) * _A_GRAPH,
        once=_ONCE + nccl * _NCCL,
    )


def layer_numbers(model: ModelConfig, rank: int, ranks: int) -> int:
    """Of one token in one layer, as if all were there at once: the residual, what is normed and what is handed on,
    q, k and v, q once turned, what was attended, and the MLP's or the experts' two. This rank's."""
    own = RankHeads(model, rank, ranks)
    attention = (3 * len(own.q()) + 2 * len(own.kv())) * model.head_dim
    if model.num_experts:
        size = len(shard_range(model.moe_intermediate_size, rank, ranks))
        mlp = model.num_experts + model.top_k * (size + model.hidden_size)
    else:
        mlp = 3 * len(shard_range(model.intermediate_size, rank, ranks))  # gate, up, and their product
    return 3 * model.hidden_size + attention + mlp
