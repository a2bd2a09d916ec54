"""The cost model by hand and beside measurements, and the real scheduler on the virtual clock."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from minisgl.core.sampling_params import SamplingParams
from minisgl.models.config import ModelConfig
from minisgl.stage5.config import SchedulerConfig
from minisgl.stage5.cost_model import H200, CostModel, Device, StepShape
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage5.simulated_engine import (
    SimulatedEngine,
    VirtualClock,
    VirtualTracer,
    answer_stream,
    pool_pages,
    token_ids,
)

COMMON = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
TINY = ModelConfig.from_dict(
    {
        **COMMON,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
    }
)
QWEN = ModelConfig.from_dict(
    {
        **COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }
)
LLAMA = ModelConfig.from_dict(
    {
        **COMMON,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
)
SLOW_MEMORY = Device("slow memory", "cuda", "bfloat16", 1e30, 1000.0, 1e30, 1000.0, 1 << 30, 0.0, 0.0, 0.0, 0.0)
SLOW_MATH = dataclasses.replace(
    SLOW_MEMORY, flops=1000.0, bandwidth=1e30, attention_flops=1000.0, attention_bandwidth=1e30
)


def scheduler_on(device: Device, **options: object) -> tuple[Scheduler, SimulatedEngine]:
    config = SchedulerConfig(**{"num_pages": 64, "page_size": 4, **options})  # type: ignore[arg-type]
    tracer = VirtualTracer(None, VirtualClock())
    engine = SimulatedEngine(config, CostModel(TINY, device), 256, tracer)
    return Scheduler(config, engine, frozenset(), tracer), engine  # type: ignore[arg-type]


def drain(scheduler: Scheduler) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while scheduler.has_work:
        forward_input = scheduler.schedule()
        assert forward_input is not None
        for output in scheduler.commit(forward_input, scheduler.forward(forward_input)):
            assert output.token_id is not None
            tokens.setdefault(output.uid, []).append(output.token_id)
    return tokens


def test_work_of_a_decode_step_by_hand() -> None:
    """TINY: of a layer q 8x8, k and v 8x4, o 8x8, three of 8x16: 192 + 384 weights; head 800; KV 2*2*4 values."""
    parts = CostModel(TINY, H200).parts(StepShape(3, 30))
    weights = 2 * (192 + 384)
    assert parts["linear"].flops == 2 * 3 * weights
    activations = 2 * (3 * 8 + 2 * 8 + 2 * 4 + 4 * 16)  # values in and out of the products of two layers, a token
    assert parts["linear"].bytes == 2 * weights + 2 * 3 * activations  # weights once, whatever the batch
    assert parts["decode attention"] == (30 * 4 * 2 * 8, 30 * 2 * 2 * 4 * 2)
    assert parts["prefill attention"] == (0, 0)
    assert parts["logits"] == (2 * 3 * 800, 800 * 2)
    assert parts["sampling"] == (0, 3 * 100 * 4 * 4)


def test_work_of_a_prefill_by_hand() -> None:
    """The second chunk of a prompt, tokens 10 to 12: they attend to 11 + 12 + 13 tokens, and read 13."""
    parts = CostModel(TINY, H200).parts(StepShape(0, 0, [(10, 13)]))
    assert parts["prefill attention"] == ((11 + 12 + 13) * 4 * 2 * 8, 13 * 2 * 2 * 4 * 2)
    assert parts["linear"].flops == 2 * 3 * 2 * (192 + 384)
    assert parts["logits"].flops == 2 * 1 * 800, "one row of logits a prompt"


@pytest.mark.parametrize("shape", [StepShape(3, 30), StepShape(0, 0, [(10, 13)]), StepShape(1, 9, [(0, 5), (4, 6)])])
def test_both_sides_of_the_roofline(shape: StepShape) -> None:
    parts = CostModel(TINY, SLOW_MEMORY).parts(shape).values()
    by_memory = CostModel(TINY, SLOW_MEMORY).device_seconds(shape)
    by_math = CostModel(TINY, SLOW_MATH).device_seconds(shape)
    assert by_memory == pytest.approx(sum(work.bytes for work in parts) / 1000)
    assert by_math == pytest.approx(sum(work.flops for work in parts) / 1000)


def test_each_part_is_bound_by_its_own_side() -> None:
    """64 decoding requests at context 100, a device of 20 FLOPs a byte: products wait for the arithmetic, attention
    (2 FLOPs a byte here) for the memory."""
    cost = CostModel(TINY, dataclasses.replace(H200, flops=20e6, bandwidth=1e6, attention_bandwidth=5e5, layer_s=0.0))
    linear_flops, linear_bytes = 2 * 64 * 1152, 2 * 1152 + 64 * 2 * 112 * 2
    assert linear_flops / 20e6 < linear_bytes / 1e6, "activations count: at this size they are what bounds"
    head_flops, head_bytes = 2 * 64 * 800, 800 * 2
    assert head_flops / 20e6 > head_bytes / 1e6
    elementwise = 64 * 2 * 2 * (8 * 8 + 4 * (8 + 2 * 4) + 3 * 16)
    moved = linear_bytes + 2 * (6400 * 32) + elementwise + 64 * 100 * 16  # attention at half the speed here
    assert cost.device_seconds(StepShape(64, 6400)) == pytest.approx(head_flops / 20e6 + moved / 1e6)


def test_overheads_of_layers_and_of_the_host() -> None:
    device = dataclasses.replace(
        SLOW_MATH, flops=1e30, attention_flops=1e30, layer_s=1.0, eager_layer_s=5.0, host_step_s=2.0, host_request_s=0.5
    )
    cost = CostModel(TINY, device)
    assert cost.device_seconds(StepShape(3, 30)) == pytest.approx(2 * 1.0), "a graph: the layers' own overhead"
    assert cost.device_seconds(StepShape(3, 30, [(0, 5)])) == pytest.approx(2 * 5.0), "eager: the launches bound it"
    assert cost.host_seconds(StepShape(3, 30, [(0, 5)])) == 2.0 + 4 * 0.5


def test_experts_read_grow_with_the_tokens() -> None:
    moe = dataclasses.replace(TINY, num_experts=8, top_k=2, moe_intermediate_size=16)
    parts = [CostModel(moe, H200).parts(StepShape(n, n))["linear"] for n in (1, 1000)]
    assert parts[0].flops == 2 * 2 * (192 + 2 * 384)
    moved = [work.bytes - n * CostModel(moe, H200).activations for work, n in zip(parts, (1, 1000), strict=True)]
    assert moved == pytest.approx([2 * 2 * (192 + 2 * 384), 2 * 2 * (192 + 8 * 384)])


@pytest.mark.parametrize(
    ("model", "floors", "measured"),
    [(QWEN, (0.305, 2.03, 7.27), (1.75, 3.55, 9.43)), (LLAMA, (3.52, 5.49, 11.48), (4.96, 7.65, 17.3))],
    ids=["qwen3-0.6b", "llama-3.1-8b"],
)
def test_decode_steps_are_plausible(model: ModelConfig, floors: tuple[float, ...], measured: tuple[float, ...]) -> None:
    """Milliseconds on one H200 at context 1024, batches of 1, 64 and 256: the byte floor <= simulated <= 1.2 times
    what mini-sglang was measured to take (2026-11-29). Simulated: Qwen3-0.6B 1.65, 3.45, 8.98; Llama-3.1-8B 5.06,
    7.23, 14.96, so from 14 % under the measured to 2 % over."""
    for batch, floor, most in zip((1, 64, 256), floors, measured, strict=True):
        simulated = CostModel(model, H200).device_seconds(StepShape(batch, batch * 1024)) * 1000
        assert floor <= simulated <= 1.2 * most


@pytest.mark.parametrize(("model", "measured", "floor"), [(QWEN, 415e3, 797e3), (LLAMA, 42.3e3, 55.6e3)])
def test_prefill_is_plausible(model: ModelConfig, measured: float, floor: float) -> None:
    """Prompt tokens a second, 960-token prompts, 16,384 a batch: measured / 1.2 <= simulated <= the FLOP bound. It is
    556 thousand and 50 thousand: 1.32 and 1.19 times mini-sglang's, whose prefill also waits for its launches."""
    shape = StepShape(0, 0, [(0, 960)] * 17)
    assert measured / 1.2 <= shape.num_tokens / CostModel(model, H200).device_seconds(shape) <= floor


def test_streams_share_no_position() -> None:
    positions = np.arange(1000)
    texts = [token_ids(stream, positions) for stream in (0, 1, 2, answer_stream(7), 2**31 - 2)]
    for number, text in enumerate(texts):
        assert (text >= 0).all()
        assert (text < 2**31 - 1).all()
        for other in texts[:number]:
            assert not (text == other).any()


def test_time_passes_by_the_cost_model_and_no_other_way() -> None:
    """Two requests, a prefill of both and two decode steps: the clock at the end is the sum, to the nanosecond."""
    device = dataclasses.replace(
        SLOW_MEMORY, bandwidth=1e6, attention_bandwidth=1e6, host_step_s=0.25, host_request_s=0.125
    )
    scheduler, engine = scheduler_on(device)
    for uid in (0, 1):
        scheduler.add(uid, [uid + 1] * 5, SamplingParams(max_tokens=3, ignore_eos=True))
    drain(scheduler)
    shapes = [StepShape(0, 0, ((0, 5), (0, 5))), StepShape(2, 12), StepShape(2, 14)]
    assert [step.shape for step in engine.steps] == shapes
    expected = [round(engine.cost.device_seconds(shape) * 1e9) for shape in shapes]
    assert [step.end - step.start for step in engine.steps] == expected
    assert engine.clock.now == sum(expected) + 3 * 500_000_000
    assert [step.extended for step in engine.steps] == [(0, 1), (), ()]


@pytest.mark.parametrize("budget", [1, 7, 8192])
@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_tokens_are_the_requests_own_stream(budget: int, cache: str) -> None:
    """Whatever the chunks and the batch; and the pages are whole when all have ended."""
    scheduler, engine = scheduler_on(H200, max_prefill_length=budget, cache=cache, num_pages=12)
    for uid in range(5):
        scheduler.add(uid, list(range(13)), SamplingParams(max_tokens=3 + uid, ignore_eos=True))
    tokens = drain(scheduler)
    for uid in range(5):
        assert tokens[uid] == token_ids(answer_stream(uid), np.arange(13, 16 + uid)).tolist()
    scheduler.check_integrity()
    stats = scheduler.stats()
    assert stats["pages_free"] + stats["pages_cached"] == engine.pool.num_pages == 12
    assert stats["rows_free"] == 256


def test_pool_by_hand() -> None:
    """0.9 of 139 GiB less 16.06 GB of weights, over pages of 16 tokens of 128 KiB, less the dummy page."""
    pages = pool_pages(SchedulerConfig(), CostModel(LLAMA, H200), 131072)
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 2 * 4096 * 128256
    assert pages == int((0.9 * (139 << 30) - 2 * weights) // (16 * 128 * 1024)) - 1
    assert pool_pages(SchedulerConfig(max_running_requests=2), CostModel(LLAMA, H200), 100) == 2 * 7, (
        "no more than rows"
    )
    with pytest.raises(ValueError, match=r"15316 MiB of weights leave no room for a page on small"):
        pool_pages(SchedulerConfig(), CostModel(LLAMA, dataclasses.replace(H200, name="small", memory=1 << 30)), 100)


def test_a_device_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    path.write_text(json.dumps({"device": dataclasses.asdict(H200), "date": "today"}))
    assert Device.from_file(path) == H200
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"fit\.json is no fit of a device .* make one with fit-device"):
        Device.from_file(path)
