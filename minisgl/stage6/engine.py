"""The engine of one rank: its model is a share, and its layers reach the other shares. Knows nothing of processes."""

from __future__ import annotations

from pathlib import Path

import torch

from minisgl.core.protocols import Communicator, NoCommunicator
from minisgl.models.config import ModelConfig
from minisgl.sampling.sampler import Sampler
from minisgl.sampling.vocab_parallel import VocabParallelSampler
from minisgl.stage3.engine import Engine
from minisgl.stage6.communicators import DistributedCommunicator, check_balance, check_devices, own_share, rank_device
from minisgl.stage6.communicators_by_name import check_communicator, make_communicator
from minisgl.stage6.config import ParallelConfig, check_shares


class RankEngine(Engine):
    """Adds to the steps "device" and "communication". With one rank it is the engine of stage 3."""

    config: ParallelConfig

    def __init__(
        self,
        config: ParallelConfig,
        folder: Path,
        model_config: ModelConfig,
        max_seq_len: int,
        rank: int = 0,
        rendezvous: Path | None = None,
    ) -> None:
        """rendezvous: where config.tp ranks meet (see DistributedCommunicator). None: this rank is alone."""
        self.rank, self._rendezvous = rank, rendezvous
        super().__init__(config, folder, model_config, max_seq_len)

    def choose_device(self) -> torch.device:
        return super().choose_device() if self._rendezvous is None else rank_device(self.config.device, self.rank)

    def connect(self) -> Communicator:
        if self._rendezvous is None:
            return NoCommunicator()
        return make_communicator(self.config.comm, self.rank, self.config.tp, self.device, self._rendezvous)

    def free_memory(self) -> int:
        """Of the rank that has least, its share; the ranks' GPUs must be about equally free."""
        free = super().free_memory()
        if self._rendezvous is None:
            return free
        assert isinstance(self.comm, DistributedCommunicator)  # from `connect`
        least, most = self.comm.extremes(free)
        check_balance(self.device, least, most)
        return own_share(self.device, least, self.comm.size)

    def make_sampler(self) -> Sampler:
        if self.comm.size == 1:
            return super().make_sampler()
        vocab, fused = self.model_config.vocab_size, not self.config.disable_fusion
        return VocabParallelSampler(vocab, self.device, fused, self.comm)

    def memory(self) -> tuple[int, int]:
        """Bytes of this rank's weights, and of its pool with the dummy page."""
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        layer = self.pool.k_cache(0).nbytes + self.pool.v_cache(0).nbytes
        return weights, layer * self.model_config.num_layers


def check_parallel(config: ParallelConfig, model: ModelConfig) -> None:
    """Raises ValueError, before any process starts, when the model cannot be cut over config.tp ranks."""
    check_devices(config.device, config.tp)
    check_communicator(config.comm, config.device)
    check_shares(config.tp, model)
