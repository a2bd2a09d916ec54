"""What one forward pass computes, going in and coming out. Knows nothing of how its members were chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from torch import Tensor

from minisgl.core.req import Req

if TYPE_CHECKING:
    from minisgl.sampling.args import BatchSamplingArgs
    from minisgl.sampling.logprobs import LogprobsOnHost


@dataclass(eq=False)
class Batch:
    """Decode rows first (one token each), then extend rows (a prompt or a chunk of one).

    Whoever prepares the batch fills the fields below `padded_reqs`, in their order.
    """

    reqs: list[Req]
    num_decode: int = 0
    padded_reqs: list[Req] = field(init=False)  # reqs, then dummy requests up to a captured size
    positions: Tensor = field(init=False)  # int64 [tokens]
    out_loc: Tensor = field(init=False)  # int32 [tokens]: the slot where each token's K and V go
    logits_rows: Tensor | None = field(init=False)  # int64 [padded_reqs]; None: every row, in order (pure decode)
    attn_metadata: object = field(init=False)  # what the backend's prepare_metadata returned
    input_ids: Tensor = field(init=False)  # int32 [tokens]

    def __post_init__(self) -> None:
        self.padded_reqs = self.reqs

    @property
    def size(self) -> int:
        return len(self.reqs)

    @property
    def padded_size(self) -> int:
        return len(self.padded_reqs)

    @property
    def num_tokens(self) -> int:
        return sum(req.extend_len for req in self.padded_reqs)

    @property
    def phase(self) -> Literal["prefill", "decode", "mixed"]:
        if self.num_decode == 0:
            return "prefill"
        return "decode" if self.num_decode == len(self.reqs) else "mixed"


class DeviceEvent(Protocol):
    """Marks a point in the device's work. `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Block until the device has passed the point."""


class ForwardInput(NamedTuple):
    """A batch ready to be launched. It is kept until the batch is committed: the device still reads it."""

    batch: Batch
    sampling_args: BatchSamplingArgs
    input_tuple: tuple[Tensor, Tensor]  # (rows, positions), int64 [tokens]: where the input ids are in the token pool
    write_tuple: tuple[Tensor, Tensor]  # (rows, positions), int64 [reqs]: where the sampled tokens go


class ForwardOutput(NamedTuple):
    """The sampled tokens of a launched batch: one for each of `batch.reqs`, chunks included."""

    next_tokens: Tensor  # int32 [reqs], on the device
    next_tokens_host: Tensor  # int32 [reqs], valid after copy_done
    copy_done: DeviceEvent  # covers the copy to the host and nothing else
    logprobs: LogprobsOnHost | None = None  # part of the same copy; None: no row asks
