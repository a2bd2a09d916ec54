"""One request in the queue. Knows nothing of its place there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from minisgl.core.req import ChunkedReq, Req
from minisgl.core.sampling_params import SamplingParams


@dataclass(eq=False)
class PendingReq:
    uid: int
    input_ids: Tensor  # int32 [n], on the host: the prompt, then what was generated before a retraction
    prompt_len: int
    sampling_params: SamplingParams
    cached_tokens: int | None = None  # what was found for it when it was first admitted; None: it never was
    chunk: ChunkedReq | None = None  # the part of it that is computed, or in flight
    number: int = 0  # how many came before it

    @classmethod
    def retracted(cls, req: Req) -> PendingReq:
        """A request that gave up its row and pages, with all the tokens it has."""
        return cls(req.uid, req.input_ids, req.prompt_len, req.sampling_params, req.cached_tokens)

    @property
    def max_len(self) -> int:
        return self.prompt_len + self.sampling_params.max_tokens

    @property
    def reports_prompt(self) -> bool:
        """Every token of the prompt is to be computed, for its logprob. With the first token all are reported."""
        return self.sampling_params.prompt_logprobs and len(self.input_ids) == self.prompt_len

    @property
    def is_resumed(self) -> bool:
        """It was admitted before: a half-done prompt, or one that was retracted."""
        return self.chunk is not None or self.cached_tokens is not None

    @property
    def state(self) -> str:
        """What the trace calls it while it waits."""
        return "queued" if self.cached_tokens is None else "retracted"
