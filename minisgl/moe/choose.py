"""Which code runs the experts of a loaded model: the loop in torch, or kernels for a whole layer. Knows no engine."""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch import Tensor, nn

from minisgl.kernel.triton_runs import triton_runs
from minisgl.layers.activation import SiluAndMul
from minisgl.moe.layer import MoELayer

log = logging.getLogger("minisgl")

_NO_GPU = "the kernels need a GPU of compute capability 8.0 or later, and triton"


def choose_experts(model: nn.Module, name: str, device: torch.device) -> None:
    """name: --moe-backend. auto is triton where that runs; what it is goes to the log. A model without experts has
    nothing to choose. Raises ValueError when the one that was asked for cannot run the model's."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not layers:
        return
    reason = "asked for" if name == "torch" else _lacks(layers[0], device)
    if name == "triton" and reason:
        raise ValueError(f"--moe-backend triton: {reason}. --moe-backend auto takes what runs here")
    if reason:
        log.info("experts: one after another in torch (%s)", reason)
        return
    log.info("experts: our Triton kernels, all of a layer at once")
    for layer in layers:
        layer.forward = partial(by_kernels, layer)  # type: ignore[method-assign]
        layer.waits_for_host = False


def check_moe_backend(name: str, device: torch.device) -> None:
    """What can be said of it before there is a model. Raises ValueError for kernels that cannot run here."""
    if name == "triton" and not triton_runs(device):
        raise ValueError(f"--moe-backend triton: {_NO_GPU}. --moe-backend auto takes what runs here")


def _lacks(layer: MoELayer, device: torch.device) -> str | None:
    if not triton_runs(device):
        return _NO_GPU
    if type(layer.experts.gate) is not SiluAndMul or not SiluAndMul.forward.__module__.startswith("minisgl.layers."):
        return "the kernels know the silu gate of this package alone"
    return None


def by_kernels(layer: MoELayer, x: Tensor) -> Tensor:
    """As `MoELayer.forward`."""
    from minisgl.kernel.triton_moe import route, run_experts

    weights, expert_ids = route(layer.gate(x), layer.top_k, layer.norm_topk_prob)
    experts = layer.experts
    return layer.comm.all_reduce(run_experts(x, experts.gate_up_proj, experts.down_proj, weights, expert_ids))
