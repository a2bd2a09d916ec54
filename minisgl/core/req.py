"""One request as the scheduler and the engine see it: its tokens, its row, and three lengths. No policy.

    0 ........ cached_len ........ device_len ........ max_device_len
    |  KV is there  |  computed next  |  may still be generated  |

`device_len` counts a token whose value may still be on the device only: it runs ahead of `input_ids`, the
tokens the host knows, by at most one step. From mini-sglang's `Req`, whose names these are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.core.outputs import FinishReason, TokenLogprob
from minisgl.core.sampling_params import SamplingParams


class Req:
    """A request with all of its known tokens in the current or an earlier batch: its next token is wanted."""

    def __init__(
        self,
        uid: int,
        input_ids: Tensor,
        sampling_params: SamplingParams,
        table_idx: int,
        cached_len: int = 0,
        cache_handle: Any = None,
        prompt_len: int | None = None,
    ) -> None:
        """input_ids: CPU int32 [n], the prompt, and after it what was generated before a retraction. table_idx: its
        row in the page table and the token pool. cached_len: tokens whose KV is already in the row. cache_handle:
        what the prefix cache gave. prompt_len: how many of input_ids are the prompt; None: all."""
        self.uid = uid
        self.sampling_params = sampling_params
        self.is_plain = sampling_params.is_plain  # asked of every request in every step
        self.table_idx = table_idx
        self.cache_handle = cache_handle
        self.prompt_len = len(input_ids) if prompt_len is None else prompt_len
        self.max_device_len = self.prompt_len + sampling_params.max_tokens
        self.cached_len = cached_len
        self.device_len = len(input_ids)
        self.cached_tokens = cached_len  # of the prompt, when the request was first admitted: what usage reports
        self.finish_reason: FinishReason | None = None
        self.retracted = False  # it runs no more: back to the queue as soon as nothing of it is in flight
        # What is known so far of those the prompt's tokens have. None: not wanted, or reported with the first token.
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if sampling_params.prompt_logprobs and len(input_ids) == self.prompt_len:
            self.prompt_logprobs = [None]
        self.in_flight = 0  # batches launched and not yet committed: rows and pages are freed only at 0
        self._ids = torch.empty(self.max_device_len, dtype=torch.int32)
        self._ids[: self.device_len] = input_ids
        self._ids_numpy = self._ids.numpy()  # the same memory: a token is stored 20 times as fast through it
        self._num_ids = self.device_len

    @property
    def input_ids(self) -> Tensor:
        """Tokens the host knows, prompt and output: int32 [n], a view."""
        return self._ids[: self._num_ids]

    @property
    def output_len(self) -> int:
        return self._num_ids - self.prompt_len

    @property
    def extend_len(self) -> int:
        """Tokens the next forward computes."""
        return self.device_len - self.cached_len

    @property
    def remain_len(self) -> int:
        return self.max_device_len - self.device_len

    @property
    def can_decode(self) -> bool:
        return self.remain_len > 0

    @property
    def next_len(self) -> int:
        """Tokens whose KV must be there before the next one can be sampled."""
        return self.device_len

    @property
    def is_leaving(self) -> bool:
        """No further step runs it: it has ended, was retracted, or its last token is on its way."""
        return self.retracted or self.finish_reason is not None or self.remain_len == 0

    @property
    def committed_len(self) -> int:
        """Tokens whose KV is known to be complete: all the host knows but the last one sampled."""
        return min(self.cached_len, self._num_ids - 1 if self.output_len else self._num_ids)

    def complete_one(self) -> None:
        """The batch is launched: what it computes is cached, and one more token exists on the device."""
        self.cached_len = self.device_len
        self.device_len += 1

    def append_host(self, token_id: int, eos_ids: frozenset[int]) -> FinishReason | None:
        """The sampled token has reached the host: note it, and why it is the last, if it is (finish_reason).

        The host's own count decides: device_len may be a step ahead.
        """
        self._ids_numpy[self._num_ids] = token_id
        self._num_ids += 1
        params = self.sampling_params
        if (token_id in eos_ids and not params.ignore_eos) or token_id in params.stop_token_ids:
            self.finish_reason = "stop"
        elif self.output_len == params.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason

    def __repr__(self) -> str:
        lengths = f"cached={self.cached_len} device={self.device_len} max={self.max_device_len}"
        return f"{type(self).__name__}(uid={self.uid} row={self.table_idx} {lengths})"


class ChunkedReq(Req):
    """A chunk of the known tokens that is not their last: it is computed, but no token may be sampled from it."""

    def __init__(self, *args: Any, chunk_end: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.device_len = chunk_end

    @property
    def can_decode(self) -> bool:
        return False

    @property
    def next_len(self) -> int:
        return self._num_ids

    def complete_one(self) -> None:
        self.cached_len = self.device_len

    def append_host(self, token_id: int, eos_ids: frozenset[int]) -> FinishReason | None:
        raise RuntimeError(f"{self!r} is a chunk: nothing is sampled from it")
