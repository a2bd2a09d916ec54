"""Weights from a folder's safetensors files into a rank's parameters, slice by slice. Knows no architecture.

The model comes with its parameters on meta. They get their memory here, once, and each piece of the checkpoint
is copied to its place in them: the peak is the model and one piece. A rank reads only the slices that it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minisgl.core.protocols import Communicator
from minisgl.layers.linear import LocalLinear
from minisgl.layers.shard import RankHeads, shard_range
from minisgl.learn import exercise
from minisgl.models.config import ModelConfig

# For each module here: the dimension of its weight that is cut (0 outputs, 1 inputs), and the checkpoint's modules
# that it is made of, in order, each with the units it is cut between. What is not in the table is whole everywhere.
SHARDING: dict[str, tuple[int, tuple[tuple[str, str], ...]]] = {
    "embed_tokens": (0, (("embed_tokens", "vocab"),)),
    "qkv_proj": (0, (("q_proj", "q heads"), ("k_proj", "kv heads"), ("v_proj", "kv heads"))),
    "o_proj": (1, (("o_proj", "q heads"),)),
    "gate_up_proj": (0, (("gate_proj", "intermediate"), ("up_proj", "intermediate"))),
    "down_proj": (1, (("down_proj", "intermediate"),)),
    "lm_head": (0, (("lm_head", "vocab"),)),
}


class Piece(NamedTuple):
    """Where a tensor of the checkpoint, or this rank's slice of it, goes."""

    parameter: str
    expert: int | None  # index into a stack of experts' weights
    dim: int
    source: range  # of the checkpoint's tensor, along dim
    total: int  # the checkpoint's tensor's size along dim
    offset: int  # into the parameter, along dim

    def destination(self, parameters: dict[str, nn.Parameter]) -> Tensor:
        parameter = parameters[self.parameter]
        view = parameter if self.expert is None else parameter[self.expert]
        return view.narrow(self.dim, self.offset, len(self.source))

    def expected_shape(self, parameters: dict[str, nn.Parameter]) -> list[int]:
        shape = list(self.destination(parameters).shape)
        shape[self.dim] = self.total
        return shape

    @exercise("6.2")
    def read(self, checkpoint: Any) -> Tensor:
        """checkpoint: this piece's tensor there, of two dimensions or one. It reads from the file only what is asked
        of it by an index."""
        start, stop = self.source.start, self.source.stop
        return checkpoint[start:stop] if self.dim == 0 else checkpoint[:, start:stop]


class ReadingPlan:
    """Which pieces of a checkpoint a rank reads, and where each goes."""

    def __init__(self, config: ModelConfig, rank: int, size: int) -> None:
        self.config, self.rank, self.size = config, rank, size

    def pieces(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Piece]]:
        """The checkpoint's tensors that a parameter is made of, by their names there."""
        path, kind = name.rsplit(".", 1)
        if ".experts." in name:  # experts.gate_up_proj is a stack: experts.7.gate_proj.weight is one part of one layer
            for expert in range(self.config.num_experts):
                yield from self.parts(name, f"{path}.{expert}.", kind, "weight", expert)
            return
        module = path.rpartition(".")[2]
        if module in SHARDING and not (kind == "bias" and SHARDING[module][0] == 1):
            yield from self.parts(name, path.removesuffix(module), module, kind)
        else:
            yield name, Piece(name, None, 0, range(len(parameter)), len(parameter), 0)

    @exercise("6.2")
    def parts(
        self, parameter: str, prefix: str, module: str, kind: str, expert: int | None = None
    ) -> Iterator[tuple[str, Piece]]:
        """The parts of SHARDING[module], this rank's slice of each, one after another in the parameter. A part's name
        in the checkpoint is prefix, part, ".", kind ("weight" or "bias")."""
        dim, parts = SHARDING[module]
        offset = 0
        for part, units in parts:
            source, total = self.cut(units, expert is not None)
            yield f"{prefix}{part}.{kind}", Piece(parameter, expert, dim, source, total, offset)
            offset += len(source)

    def cut(self, units: str, of_expert: bool = False) -> tuple[range, int]:
        """This rank's elements of a dimension, and how many there are in all. units: as SHARDING has them."""
        config, heads = self.config, RankHeads(self.config, self.rank, self.size)
        if units in ("q heads", "kv heads"):
            own, total = (heads.q(), config.num_heads) if units == "q heads" else (heads.kv(), config.num_kv_heads)
            return range(own.start * config.head_dim, own.stop * config.head_dim), total * config.head_dim
        intermediate = config.moe_intermediate_size if of_expert else config.intermediate_size
        total = {"vocab": config.vocab_size, "intermediate": intermediate}[units]
        return shard_range(total, self.rank, self.size), total


def load_weights(
    model: nn.Module,
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    comm: Communicator,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill the model's parameters from folder/*.safetensors. progress(bytes done, bytes of this rank).

    Raises ValueError that names all tensors that are missing, unexpected or of another shape, before any is read.
    """
    parameters = dict(model.named_parameters())
    reading = ReadingPlan(config, comm.rank, comm.size)
    plan = {name: piece for key, value in parameters.items() for name, piece in reading.pieces(key, value)}
    files = _files(folder)
    _check(folder, files, plan, parameters, config)
    allocate(model, dtype, device)
    done, total = 0, sum(parameter.nbytes for parameter in parameters.values())
    for file in files:
        with safe_open(file, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 (it is no dict)
                if (piece := plan.get(name)) is None:
                    continue
                destination = piece.destination(parameters)
                destination.copy_(piece.read(checkpoint.get_slice(name)))
                done += destination.nbytes
                if progress is not None:
                    progress(done, total)
    parameters.clear()  # or every weight would live on beside its packed copy
    _pack(model)


@torch.no_grad()
def dummy_weights(model: nn.Module, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
    """Random weights under which activations neither vanish nor explode: each product keeps its input's variance.
    What ranks hold in common is the same on all of them; their shards do not make one model."""
    allocate(model, dtype, device)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator(device).manual_seed(seed + index)
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)  # a norm
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    _pack(model)


def allocate(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give parameters that are on meta memory, not yet set. A tied one stays one: it is exchanged in place."""
    for parameter in model.parameters():
        real = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=False)
        torch.utils.swap_tensors(parameter, real)


def _pack(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, LocalLinear):
            module.pack()


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = [folder / "model.safetensors"]
    else:
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = sorted(folder / Path(name).name for name in names)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors files: {error!r:.200}") from None
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise ValueError(f"{folder} lacks {_list(absent)}: only safetensors files are read, so convert other formats")
    return files


def _check(
    folder: Path, files: list[Path], plan: dict[str, Piece], parameters: dict[str, nn.Parameter], config: ModelConfig
) -> None:
    shapes: dict[str, list[int]] = {}
    for file in files:
        shapes |= _shapes(file)
    missing = plan.keys() - shapes.keys()
    unexpected = {name for name in shapes.keys() - plan.keys() if not _is_redundant(name, config)}
    wrong = [
        f"{name} is {shapes[name]}, not {piece.expected_shape(parameters)}"
        for name, piece in plan.items()
        if name in shapes and shapes[name] != piece.expected_shape(parameters)
    ]
    faults = {"missing": sorted(missing), "unexpected": sorted(unexpected), "of another shape": sorted(wrong)}
    text = "; ".join(f"{kind}: {_list(names)}" for kind, names in faults.items() if names)
    if text:
        raise ValueError(f"the weights in {folder} are not those of its config.json's {config.architecture}: {text}")


def _shapes(file: Path) -> dict[str, list[int]]:
    try:
        with safe_open(file, framework="pt") as checkpoint:
            return {name: checkpoint.get_slice(name).get_shape() for name in checkpoint.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}): fetch it again") from error


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Old checkpoints hold RoPE's frequencies; some hold a tied head a second time."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _list(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
