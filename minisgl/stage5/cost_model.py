"""How long a step takes, from what it computes and moves: a roofline for each part. Knows nothing of what it serves.

A part takes max(FLOPs / peak, bytes / bandwidth): Williams et al., "Roofline" (2009). The parts of a step follow one
another, and each layer adds what its kernels cost however small they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from minisgl.core.batch import Batch
from minisgl.models.config import ModelConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_PASSES = 4  # times that sampling reads or writes a logit, in float32


@dataclass(frozen=True)
class Device:
    """What a device can do with values of one dtype. Seconds, bytes and FLOPs throughout."""

    name: str
    type: str  # "cuda" or "cpu": how the pool is sized
    dtype: str
    flops: float  # a second, of matrix products
    bandwidth: float  # bytes a second
    attention_flops: float  # the same two in attention, whose kernels may be further from what the device can do
    attention_bandwidth: float
    memory: int  # free before the model is loaded
    layer_s: float  # of the device, for each layer of any step
    eager_layer_s: float  # the least that a layer takes when its kernels are launched one by one (no graph: prefill)
    host_step_s: float  # of the scheduler's thread, for each step
    host_request_s: float  # and for each request in it

    def rates(self, part: str) -> tuple[float, float]:
        """FLOPs and bytes a second in one of `CostModel.parts`."""
        in_attention = part.endswith("attention")
        return (self.attention_flops, self.attention_bandwidth) if in_attention else (self.flops, self.bandwidth)

    @classmethod
    def from_file(cls, path: Path) -> Device:
        """The "device" object of a JSON file that `python -m minisgl.benchmark fit-device` wrote."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["device"]
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no fit of a device ({error!r:.200}): make one with fit-device") from error


H200 = Device(
    # One H200, 2026-11-29, torch 2.11, CUDA 13: bf16 matrix product 780 TFLOP/s, copy to read 4.26 to 4.43 TB/s. The
    # last four are what mini-sglang needs beyond the roofline: decode of one request (1.75 ms for 28 layers, 4.96 ms
    # for 32), a prompt's first token (11.5 ms for 28 layers, eager), and the 3.4 ms of a step that its overlap hides.
    name="h200",
    type="cuda",
    dtype="bfloat16",
    flops=780e12,
    bandwidth=4.3e12,
    attention_flops=780e12,
    attention_bandwidth=4.3e12,
    memory=139 << 30,
    layer_s=48e-6,
    eager_layer_s=0.38e-3,
    host_step_s=1e-3,
    host_request_s=18e-6,
)


class StepShape(NamedTuple):
    """All of a batch that its cost depends on."""

    num_decode: int  # requests that compute one token
    decode_context: int  # tokens those attend to, in all
    extends: Sequence[tuple[int, int]] = ()  # (cached_len, device_len) of each prompt or chunk

    @classmethod
    def of(cls, batch: Batch) -> StepShape:
        """As long as the lengths are still those that the step computes: before `complete_one`."""
        decodes, extends = batch.reqs[: batch.num_decode], batch.reqs[batch.num_decode :]
        context = sum([req.device_len for req in decodes])
        return cls(len(decodes), context, tuple([(req.cached_len, req.device_len) for req in extends]))

    @property
    def num_requests(self) -> int:
        return self.num_decode + len(self.extends)

    @property
    def num_tokens(self) -> int:
        return self.num_decode + sum(end - start for start, end in self.extends)


class Work(NamedTuple):
    flops: float
    bytes: float


class CostModel:
    def __init__(self, model: ModelConfig, device: Device) -> None:
        self.model, self.device = model, device
        self.item = ITEM_BYTES[device.dtype]
        hidden, q_size, kv_size = (
            model.hidden_size,
            model.num_heads * model.head_dim,
            model.num_kv_heads * model.head_dim,
        )
        self.mlp_width = model.moe_intermediate_size if model.num_experts else model.intermediate_size
        self.attention_weights = model.num_layers * hidden * (2 * q_size + 2 * kv_size)
        self.expert_weights = model.num_layers * 3 * hidden * self.mlp_width  # one expert's, or the dense MLP's
        self.head_weights = hidden * model.vocab_size
        self.kv_bytes = 2 * model.num_layers * kv_size * self.item  # of a token
        self.attention_flops = 4 * model.num_layers * q_size  # of a token for each that it attends to
        # Values read or written beside matrix products: two add-norms, rope and store of q, k and v, silu and multiply.
        active = max(1, model.top_k) * self.mlp_width
        self.elementwise = model.num_layers * (8 * hidden + 4 * (q_size + 2 * kv_size) + 3 * active) * self.item
        self.activations = model.num_layers * (3 * hidden + 2 * q_size + 2 * kv_size + 4 * active) * self.item
        self.rates = [device.rates(part) for part in self.parts(StepShape(1, 1))]

    @property
    def model_bytes(self) -> int:
        """The weights of the linear layers and the embedding."""
        copies = 1 if self.model.tie_word_embeddings else 2
        experts = max(1, self.model.num_experts) * self.expert_weights
        return (self.attention_weights + experts + copies * self.head_weights) * self.item

    def parts(self, shape: StepShape) -> dict[str, Work]:
        """FLOPs and bytes of each part of a step."""
        tokens, rows = shape.num_tokens, shape.num_requests
        flops = 2 * tokens * (self.attention_weights + max(1, self.model.top_k) * self.expert_weights)
        weights = self.attention_weights + self._experts_read(tokens) * self.expert_weights
        attended = sum((end * (end + 1) - start * (start + 1)) // 2 for start, end in shape.extends)
        context = sum(end for _, end in shape.extends)
        return {
            "linear": Work(flops, weights * self.item + tokens * self.activations),
            "decode attention": Work(shape.decode_context * self.attention_flops, shape.decode_context * self.kv_bytes),
            "prefill attention": Work(attended * self.attention_flops, context * self.kv_bytes),
            "elementwise": Work(0, tokens * self.elementwise),
            "logits": Work(2 * rows * self.head_weights, self.head_weights * self.item),
            "sampling": Work(0, rows * self.model.vocab_size * 4 * LOGITS_PASSES),
        }

    def device_seconds(self, shape: StepShape) -> float:
        device, arithmetic = self.device, 0.0
        for work, (flops, bandwidth) in zip(self.parts(shape).values(), self.rates, strict=True):
            arithmetic += max(work.flops / flops, work.bytes / bandwidth)
        busy = self.model.num_layers * device.layer_s + arithmetic
        return max(busy, self.model.num_layers * device.eager_layer_s) if shape.extends else busy

    def host_seconds(self, shape: StepShape) -> float:
        return self.device.host_step_s + shape.num_requests * self.device.host_request_s

    def _experts_read(self, tokens: int) -> float:
        """Expected number of experts that some token is sent to, were the router's choices even."""
        experts = self.model.num_experts
        return experts * (1 - (1 - self.model.top_k / experts) ** tokens) if experts else 1.0
