"""All that a layer may know about the forward pass it is part of. Immutable, handed from call to call.

There is no global "current batch" (mini-sglang and nano-vllm have one): a notebook holds several engines, and
with overlap two batches are alive at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from minisgl.core.protocols import AttentionBackend, KVCache
    from minisgl.layers.rotary import Rotation


@dataclass(frozen=True, eq=False)
class Context:
    input_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int64 [tokens]
    logits_rows: Tensor | None  # int64 [rows]: tokens whose logits are wanted; None: all of them
    attention: AttentionBackend
    attn_metadata: object = None  # from attention.prepare_metadata
    kv_cache: KVCache | None = None  # None: nothing is cached (stage 1)
    page_table: Tensor | None = None  # int32 [rows + 1, width] of token slots
    out_loc: Tensor | None = None  # int32 [tokens]: slots to write
    rotary: Rotation | None = None  # of these positions: the model adds it, for all its layers
