"""The least time a decode step can take: the bytes it must read, over what memory can deliver. Knows no engine."""

from __future__ import annotations

import time

import torch

from minisgl.core.protocols import NoCommunicator
from minisgl.models.config import ModelConfig
from minisgl.models.registry import create_model


def step_bytes(config: ModelConfig, dtype: torch.dtype, batch: int, context: int) -> int:
    """What a decode step of `batch` requests with `context` tokens each must read: the weights once, and all K and V.

    Of an embedding table that is not also the head a step reads only some rows; of experts, those that are chosen: as
    many different ones as `batch` draws of top_k among all would be expected to hit.
    """
    model = create_model(config, NoCommunicator(), 1, dtype, torch.device("cpu"))  # on meta: shapes only
    weights = 0.0
    for name, parameter in model.named_parameters():
        share = 1.0
        if "embed_tokens" in name and not config.tie_word_embeddings:
            share = min(1.0, batch / config.vocab_size)
        elif ".experts." in name:
            share = 1 - (1 - config.top_k / config.num_experts) ** batch
        weights += parameter.nbytes * share
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    return int(weights + batch * context * kv)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second at which this device reads memory, measured: the largest of a gigabyte of numbers (on a CPU of
    256 MB), at its fastest."""
    on_gpu = device.type == "cuda"
    data = torch.ones((1 << 30 if on_gpu else 1 << 28) // 4, device=device)
    times = 16 if on_gpu else 1  # in a row: a launch and the wait for it are a tenth of one read

    def read() -> float:
        start = time.perf_counter()
        for _ in range(times):
            data.amax()
        if on_gpu:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / times

    read()
    return data.nbytes / min(read() for _ in range(9))
