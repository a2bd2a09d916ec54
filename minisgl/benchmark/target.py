"""What is measured: a model and an engine's settings, from the command line. Knows no measurement."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from minisgl.benchmark.models import CONFIGS, weightless_folder
from minisgl.benchmark.records import record
from minisgl.core.cli import add_config_arguments, config_options
from minisgl.core.config import Config, flag, make_config
from minisgl.kernel.device import resolve_device, resolve_dtype
from minisgl.models.config import ModelConfig
from minisgl.models.resolve import resolve_model
from minisgl.stage7.config import OverlapConfig
from minisgl.stage7.llm import LLM


@dataclass(frozen=True)
class Target:
    """name: the model's, in records. options: what differs from the defaults of config_class."""

    name: str
    options: dict[str, Any]
    config_class: type[OverlapConfig]

    @property
    def config(self) -> OverlapConfig:
        return make_config(self.config_class, self.options)

    @cached_property
    def folder(self) -> Path:
        return resolve_model(self.config.model, self.config.model_source)

    @cached_property
    def model_config(self) -> ModelConfig:
        return ModelConfig.from_folder(self.folder)

    @property
    def device(self) -> torch.device:
        return resolve_device(self.config.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        return resolve_dtype(self.config.dtype, self.device)

    @property
    def flags(self) -> list[str]:
        """The command line that says the same."""
        words = []
        for name, value in self.options.items():
            words += [flag(name)] if value is True else [flag(name), str(value)]
        return words

    def but(self, **options: Any) -> Target:
        return dataclasses.replace(self, options={**self.options, **options})

    def record(self, bench: str, metric: str, unit: str, value: float, **setting: Any) -> dict[str, Any]:
        """setting: what was measured, beside the engine's own settings. With a "server" these are not known."""
        hidden = ("model", "tp", "trace", "dummy_weight", "api_key")
        shown = setting if "server" in setting else {**setting, "dtype": str(self.dtype).removeprefix("torch.")}
        shown |= {name: value for name, value in self.options.items() if name not in hidden}
        text = " ".join(f"{name}={value}" for name, value in shown.items())
        return record(bench, self.name, text, metric, unit, value, self.config.tp)


def add_engine_arguments(parser: argparse.ArgumentParser, config_class: type[OverlapConfig] = OverlapConfig) -> None:
    add_config_arguments(parser, config_class)
    parser.epilog = f"--model also takes {', '.join(CONFIGS)}: random weights in its shapes"


def target(args: argparse.Namespace, config_class: type[OverlapConfig] = OverlapConfig) -> Target:
    """Raises ValueError when a setting is wrong."""
    options = _changed(config_class, config_options(config_class, args))
    name = args.model
    if name in CONFIGS:
        options |= {"model": str(weightless_folder(name)), "dummy_weight": True}
    elif Path(name).is_dir():
        name = Path(name).resolve().name
    make_config(config_class, options)
    return Target(name, options, config_class)


@contextmanager
def opened(target: Target) -> Iterator[LLM]:
    """Stage 7's LLM."""
    with closing(LLM(**target.options)) as llm:
        yield llm


def _changed(config_class: type[Config], options: dict[str, Any]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    return {name: value for name, value in options.items() if value != defaults[name]}
