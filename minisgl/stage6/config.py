"""What can be set about ranks. Does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minisgl.core.config import option
from minisgl.layers.shard import RankHeads
from minisgl.models.config import ModelConfig
from minisgl.stage5.config import SchedulerConfig

COMMUNICATORS = ("auto", "nccl", "pynccl", "pynccl-window", "symm")


@dataclass(frozen=True)
class ParallelConfig(SchedulerConfig):
    group: ClassVar[str] = "tensor parallelism"

    tp: int = option(1, "ranks (processes) the model is cut over: tensor parallelism", metavar="N")
    comm: str = option(
        "auto",
        "how ranks on GPUs add up their shares: nccl, pynccl (NCCL without torch's streams; -window: through buffers "
        "registered with it, which makes NVLink multicast objects unless NCCL_NVLS_ENABLE=0), or symm, which takes "
        "what is small through symmetric memory; auto is symm where the GPUs can, else nccl",
        COMMUNICATORS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("tp", 1)


def check_shares(tp: int, model: ModelConfig) -> None:
    """Raises ValueError when the model cannot be cut over so many ranks."""
    units = {
        "attention heads": model.num_heads,
        "MLP columns": model.intermediate_size,
        "columns an expert": model.moe_intermediate_size or model.intermediate_size,
        "tokens in the vocabulary": model.vocab_size,
    }
    for name, count in units.items():
        if tp > count:
            raise ValueError(f"--tp {tp} is more than this model's {count} {name}: use at most {count}")
    RankHeads(model, 0, tp).q()
