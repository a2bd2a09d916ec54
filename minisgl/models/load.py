"""A model ready to run, from a folder: build on meta, then stream the weights in. Knows nothing of caches."""

from __future__ import annotations

from pathlib import Path

import torch

from minisgl.core.protocols import Communicator, NoCommunicator
from minisgl.models.config import ModelConfig
from minisgl.models.registry import CausalLM, create_model
from minisgl.models.weights import dummy_weights, load_weights


def load_model(
    folder: Path,
    model_config: ModelConfig,
    max_seq_len: int,
    device: torch.device,
    dtype: torch.dtype,
    dummy_weight: bool = False,
    communicator: Communicator | None = None,
) -> CausalLM:
    """The rank's share of the model, in memory once: there is never a second copy to shard or to cast."""
    comm = communicator or NoCommunicator()
    model = create_model(model_config, comm, max_seq_len, dtype, device)
    if dummy_weight:
        dummy_weights(model, dtype, device)
    else:
        load_weights(model, folder, model_config, dtype, device, comm)
    return model.eval()


def weight_bytes(model_config: ModelConfig, communicator: Communicator, dtype: torch.dtype) -> int:
    """What the rank's weights take at least, before any of them is read: a CPU packs a tied head apart."""
    model = create_model(model_config, communicator, 1, dtype, torch.device("cpu"))
    return sum(parameter.nbytes for parameter in model.parameters())
