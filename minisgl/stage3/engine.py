"""One device: a model, its memory, and a forward pass over a batch. Knows nothing of queues or policies."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from minisgl.attention import check_attention, create_attention
from minisgl.core.batch import Batch, ForwardOutput
from minisgl.core.context import Context
from minisgl.core.errors import EngineFailure
from minisgl.core.protocols import Communicator, NoCommunicator
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.threads import set_threads
from minisgl.kernel.device import free_memory, host_copy, pool_terms, resolve_device, resolve_dtype, to_device
from minisgl.layers.shard import RankHeads
from minisgl.models.config import ModelConfig
from minisgl.models.fuse import fuse
from minisgl.models.load import load_model, weight_bytes
from minisgl.moe.choose import check_moe_backend, choose_experts
from minisgl.sampling.args import BatchSamplingArgs
from minisgl.sampling.logprobs import LogprobArgs, LogprobsOnHost, PromptTokens
from minisgl.sampling.sampler import Sampler
from minisgl.stage3.config import EngineConfig
from minisgl.stage3.page_pool import KVCachePool
from minisgl.stage3.page_table import PageTable

log = logging.getLogger("minisgl")


class EngineStartError(EngineFailure):
    """A step of the start failed for a reason that is not a setting's: its message names the step."""


class Engine:
    """Starts in six named steps; a later stage adds to a step by overriding the method that does it."""

    def __init__(self, config: EngineConfig, folder: Path, model_config: ModelConfig, max_seq_len: int) -> None:
        self.config, self.model_config, self.max_seq_len = config, model_config, max_seq_len
        with _step("device"):
            set_threads(config.threads)
            self.device = self.choose_device()
            self.dtype = resolve_dtype(config.dtype, self.device)
            check_attention(config.attn, self.dtype, self.device)  # here: weights may take minutes
            check_moe_backend(config.moe_backend, self.device)
        with _step("communication"):
            self.comm = self.connect()
            free_before = self.free_memory()
            if config.num_pages is not None:
                self._check_num_pages(max(0, free_before - weight_bytes(model_config, self.comm, self.dtype)))
        with _step("weights"):
            self.model = load_model(
                folder, model_config, max_seq_len, self.device, self.dtype, config.dummy_weight, self.comm
            )
            self.sampler = self.make_sampler()
        with _step("KV cache pool"):
            own = RankHeads(model_config, self.comm.rank, self.comm.size)
            shape = len(own.q()), len(own.kv()), model_config.head_dim, config.page_size, self.dtype, self.device
            self.attention = create_attention(config.attn, *shape)
            if not config.disable_fusion:
                fuse(self.model, self.attention, self.device)
            plain = config.disable_fusion and config.moe_backend == "auto"
            choose_experts(self.model, "torch" if plain else config.moe_backend, self.device)
            self.pool = self._make_pool(free_before)
        with _step("page table"):
            rows = config.max_running_requests
            self.table = PageTable(rows, max_seq_len, config.page_size, self.pool.dummy_slot, self.device)
            self.dummy_req = Req(-1, torch.zeros(1, dtype=torch.int32), SamplingParams(max_tokens=1), rows)
        with _step("graphs"):
            self.prepare_to_run()

    def choose_device(self) -> torch.device:
        return resolve_device(self.config.device)

    def connect(self) -> Communicator:
        """Step 2. One rank alone has nobody to reach."""
        return NoCommunicator()

    def free_memory(self) -> int:
        """Bytes of the device, before anything is on it."""
        return free_memory(self.device)

    def make_sampler(self) -> Sampler:
        return Sampler(self.model_config.vocab_size, self.device, fused=not self.config.disable_fusion)

    def reserved_bytes(self) -> int:
        """What step 6 will take of the device's memory, which the pool leaves to it. Asked when model and attention are
        there."""
        return 0

    def prepare_to_run(self) -> None:
        """Step 6. There is nothing to capture: every forward is launched layer by layer."""

    def pad(self, batch: Batch) -> None:
        """Add dummy requests up to a size that can be launched: eager forwards take any."""

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Fill in what the model needs, once the page table holds the batch's slots. Returns (rows, positions),
        int64 [tokens]: which token of which row each of the batch's tokens is."""
        indices, ends = _token_indices(batch)
        table_rows, batch.positions = to_device(indices, self.device)
        batch.out_loc = self.table.device[table_rows, batch.positions]
        batch.logits_rows = None if ends is None else to_device(ends, self.device)
        batch.attn_metadata = self.attention.prepare_metadata(batch, self.table.device)
        return table_rows, batch.positions

    @torch.inference_mode()
    def forward_batch(self, batch: Batch, args: BatchSamplingArgs) -> ForwardOutput:
        """Launch the batch and the copy of its sampled tokens to the host; wait for neither."""
        if args.logprobs is not None:
            return self._forward_and_measure(batch, args, args.logprobs)
        logits = self.run_model(batch)  # [padded_reqs, local_vocab]
        next_tokens = self.sampler.sample(logits[: batch.size], args)  # [reqs]
        next_tokens_host, copy_done = host_copy(next_tokens)
        return ForwardOutput(next_tokens, next_tokens_host, copy_done)

    def _forward_and_measure(self, batch: Batch, args: BatchSamplingArgs, wanted: LogprobArgs) -> ForwardOutput:
        """As `forward_batch`, and what was measured travels with the tokens."""
        if wanted.prompts is None:
            logits, of_prompts = self.run_model(batch), []
        else:
            logits, measured = self._run_with_prompts(batch, wanted.prompts)
            of_prompts = [measured]
        next_tokens = self.sampler.sample(logits[: batch.size], args)  # [reqs]
        of_tokens = wanted.measure(logits, next_tokens, self.model.lm_head.gather)
        parts = next_tokens, *(part.flatten() for part in (of_tokens, *of_prompts))
        host, copy_done = host_copy(torch.cat(parts))
        measured_host = host[batch.size :].view(-1, 1 + 2 * wanted.max_top)  # [sampled + prompt tokens, ...]
        return ForwardOutput(next_tokens, host[: batch.size], copy_done, LogprobsOnHost(wanted, measured_host))

    def _run_with_prompts(self, batch: Batch, prompts: PromptTokens) -> tuple[Tensor, Tensor]:
        """Logits as those of `run_model`, and what the prompts' tokens say of the next. Layer by layer, in no graph."""
        assert batch.logits_rows is not None  # a prompt's batch has some
        rows = torch.cat((batch.logits_rows, prompts.indices))
        hidden = self.model.model(replace(self.context(batch), logits_rows=rows))  # [rows, hidden]
        last, others = hidden.split((len(batch.logits_rows), len(prompts.indices)))
        return self.model.lm_head(last), prompts.measure(others, self.model.lm_head.whole)

    def run_model(self, batch: Batch) -> Tensor:
        """Logits of each request's last token, this rank's columns: [padded_reqs, local_vocab]."""
        return self.model(self.context(batch))

    def context(self, batch: Batch) -> Context:
        return Context(
            input_ids=batch.input_ids,
            positions=batch.positions,
            logits_rows=batch.logits_rows,
            attention=self.attention,
            attn_metadata=batch.attn_metadata,
            kv_cache=self.pool,
            page_table=self.table.device,
            out_loc=batch.out_loc,
        )

    def _make_pool(self, free_before: int) -> KVCachePool:
        """Every rank makes as many pages as the one with least room for them."""
        model, size = self.model_config, self.config.page_size
        kv_heads = len(RankHeads(model, self.comm.rank, self.comm.size).kv())
        each = self._page_bytes()
        num_pages = self.config.num_pages
        if num_pages is None:
            held = sum(p.nbytes for p in self.model.parameters()) + self.reserved_bytes()
            terms = pool_terms(self.device, self.config.memory_ratio, free_before, held)
            most = self.config.max_running_requests * -(-self.max_seq_len // size)  # what all rows can hold
            num_pages = min(most, self.comm.minimum(KVCachePool.pages_in_budget(*terms, each)))
        if num_pages < 1:
            raise ValueError(
                f"no memory for a single page of {each} bytes: use a smaller model, pages smaller than {size}, or "
                "a higher --memory-ratio on a GPU"
            )
        self._check_num_pages(free_memory(self.device))  # again: more than the weights is there by now
        log.info("KV cache: %d pages of %d tokens, %.2f GiB", num_pages, size, (num_pages + 1) * each / 2**30)
        return KVCachePool(model.num_layers, num_pages, size, kv_heads, model.head_dim, self.dtype, self.device)

    def _page_bytes(self) -> int:
        model = self.model_config
        kv_heads = len(RankHeads(model, self.comm.rank, self.comm.size).kv())
        return KVCachePool.page_bytes(model.num_layers, self.config.page_size, kv_heads, model.head_dim, self.dtype)

    def _check_num_pages(self, free: int) -> None:
        """free: bytes left to the pool. Raises ValueError when the setting asks for more."""
        num_pages, each = self.config.num_pages, self._page_bytes()
        if num_pages is not None and (num_pages + 1) * each > free:
            needed = (num_pages + 1) * each / 2**30
            raise ValueError(
                f"--num-pages {num_pages} needs {needed:.2f} GiB, and {free / 2**30:.2f} GiB are free: give at "
                f"most {max(0, free // each - 1)}, or leave it out"
            )


def _token_indices(batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Row and position of each token, int64 [2, tokens], and the index of each request's last, int64 [padded_reqs];
    None if each has one."""
    reqs = batch.padded_reqs
    if batch.phase == "decode":
        return torch.tensor([[req.table_idx for req in reqs], [req.cached_len for req in reqs]]), None
    numbers = [(req.table_idx, req.cached_len, req.device_len) for req in reqs]
    rows, starts, ends = torch.tensor(numbers).T  # each [padded_reqs]
    counts = ends - starts
    last = counts.cumsum(0) - 1
    offsets = (ends - 1 - last).repeat_interleave(counts)  # a token's position less its index in the batch
    return torch.stack((rows.repeat_interleave(counts), torch.arange(len(offsets)) + offsets)), last


@contextmanager
def _step(name: str) -> Iterator[None]:
    """One step of the start: its time goes to the log, and its name to the error it raises."""
    start = time.perf_counter()
    try:
        yield
    except ValueError:
        raise  # what the user asked for: already one clear line
    except Exception as error:
        raise EngineStartError(f"the engine failed to start at step {name!r}: {error}") from error
    log.info("engine start: %s %.2f s", name, time.perf_counter() - start)
