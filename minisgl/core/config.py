"""Settings shared by every stage, and how a stage adds its own. Knows nothing of command lines or models.

A stage's settings are a frozen dataclass that extends those of the stage before it. Each field is made with
`option`, whose help text and choices are also the command line's: a setting is declared once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from minisgl.core.threads import check_threads

ConfigT = TypeVar("ConfigT", bound="Config")


def option(default: Any, help: str, choices: tuple[str, ...] | None = None, metavar: str | None = None) -> Any:
    """A setting: its default, the line `--help` prints, and its permitted values if they are few."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


@dataclass(frozen=True)
class Config:
    group: ClassVar[str] = "model"  # the heading of a class's own settings in --help

    model: str = option("smollm2-135m", "local folder, hub id such as Qwen/Qwen3-0.6B, or the built-in smollm2-135m")
    model_source: str = option("hf", "the hub that ids are fetched from", ("hf", "modelscope"))
    dtype: str = option(
        "auto", "auto is bfloat16 where the hardware has it", ("auto", "float32", "bfloat16", "float16")
    )
    device: str = option("auto", "where the model runs", ("auto", "cpu", "cuda"))
    threads: int | None = option(None, "torch threads of each process that computes", metavar="N")
    max_seq_len: int | None = option(None, "longest prompt and answer in tokens; default: the model's own limit")
    dummy_weight: bool = option(False, "random weights: the folder needs only its config and tokenizer")
    seed: int = option(0, "draws the seeds of requests that bring none")
    trace: str | None = option(None, "record what happens, and write Perfetto's JSON here at exit", metavar="FILE")

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike):
            raise ValueError(f"model must be a str, such as {Config.model!r}, not {type(self.model).__name__}")
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            value = getattr(self, field.name)
            if choices and value not in choices:
                raise ValueError(f"{flag(field.name)} must be one of {', '.join(choices)}, not {value!r:.80}")
        self.at_least("threads", 1)
        check_threads(self.threads)
        self.at_least("max_seq_len", 2)
        self.at_least("seed", 0)

    def at_least(self, name: str, low: float) -> None:
        """Raises ValueError when the setting is given and is below `low`, or is not a number at all."""
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= low:
            raise ValueError(f"{flag(name)} must be at least {low:g}, not {value!r:.80}")


def flag(name: str) -> str:
    """The command line's spelling of a setting."""
    return "--" + name.replace("_", "-")


def make_config(config_class: type[ConfigT], options: Mapping[str, Any]) -> ConfigT:
    """Raises ValueError that names an unknown setting and those that exist (TypeError would name `__init__`)."""
    known = [field.name for field in dataclasses.fields(config_class)]
    for name in options:
        if name not in known:
            raise ValueError(f"unknown setting {name!r}: this stage knows {', '.join(known)}")
    return config_class(**options)
