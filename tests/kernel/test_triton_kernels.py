"""Each Triton kernel against the plain torch it stands for: compiled on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 (and NumPy below 2.4)", allow_module_level=True)

from minisgl.core.sampling_params import SamplingParams
from minisgl.kernel.device import zeros
from minisgl.kernel.triton_linear import gemv, norm_gemv
from minisgl.kernel.triton_norm import add_rms_norm, rms_norm, silu_and_mul
from minisgl.kernel.triton_rope import norm_rope_store
from minisgl.kernel.triton_sample import best_keys, sample_rows
from minisgl.layers.activation import SiluAndMul
from minisgl.layers.norm import RMSNorm, RMSNormFused
from minisgl.layers.rotary import Rotation
from minisgl.sampling.args import BatchSamplingArgs
from minisgl.sampling.noise import gumbel_noise
from minisgl.sampling.sampler import Sampler
from minisgl.sampling.vocab_parallel import sort_keys, tokens_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {  # of the whole tensor: a bfloat16 rounding is 2e-3, and the interpreter cuts off instead
    torch.float32: 1e-6,
    torch.bfloat16: 5e-3 if DEVICE.type == "cuda" else 2e-2,
}


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def assert_near(out: Tensor, expected: Tensor) -> None:
    assert out.dtype == expected.dtype
    tolerance = TOLERANCE.get(out.dtype, 1e-2)
    assert (out.double() - expected.double()).norm() <= tolerance * expected.double().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (5, 100), (3, 1024)])
def test_norms(tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNormFused(size, 1e-5).to(DEVICE, dtype)
    norm.weight = torch.nn.Parameter(random(size, dtype=dtype), requires_grad=False)
    x, residual = random(tokens, size, dtype=dtype), random(tokens, size, dtype=dtype)
    kept = x.clone(), residual.clone()
    for given in (residual, None):
        for out, expected in zip(add_rms_norm(x, given, norm.weight, 1e-5), norm(x, given), strict=True):
            assert_near(out, expected)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])
    wide = random(tokens, 3, size + 7, dtype=dtype)[:, :, :size]
    assert_near(rms_norm(wide, norm.weight, 1e-5), RMSNorm.forward(norm, wide))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [2, 4])
def test_norm_of_a_sum(parts: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNormFused(100, 1e-5).to(DEVICE, dtype)
    norm.weight = torch.nn.Parameter(random(100, dtype=dtype), requires_grad=False)
    x, residual = random(parts, 5, 100, dtype=dtype), random(5, 100, dtype=dtype)
    whole = x.float().sum(0).to(dtype)
    for out, expected in zip(add_rms_norm(x, residual, norm.weight, 1e-5), norm(whole, residual), strict=True):
        assert out.shape == residual.shape
        assert_near(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 1500])
def test_gate(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = random(3, 2 * size, dtype=dtype)
    assert_near(silu_and_mul(gate_up), SiluAndMul()(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (37, 1024), (6, 2500)])
def test_gemv(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = random(1, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype)
    assert_near(gemv(x, weight).double(), x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(38, 1024), (6, 100)])
def test_norm_gemv(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (
        random(1, inputs, dtype=dtype),
        random(1, inputs, dtype=dtype),
        random(outputs, inputs, dtype=dtype),
    )
    norm = RMSNormFused(inputs, 1e-6)
    norm.weight = torch.nn.Parameter(random(inputs, dtype=dtype), requires_grad=False)
    normed, expected_total = norm(x, residual)
    product = (normed.double() @ weight.double().T).to(dtype)
    for silu, expected in ((False, product), (True, SiluAndMul()(product))):
        out, total = norm_gemv(x, residual, norm.weight, 1e-6, weight, silu)
        assert_near(out, expected)
        assert_near(total, expected_total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 2, 16), (2, 1, 20)])
def test_norm_rope_store(q_heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens, slots = 5, 30
    heads = random(tokens, q_heads + 2 * kv_heads, head_dim, dtype=dtype)
    table, positions = random(40, head_dim, dtype=dtype), torch.randint(0, 40, (tokens,), device=DEVICE)
    k_cache, v_cache = random(2, slots, kv_heads, head_dim, dtype=dtype)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    out_loc = torch.randperm(slots, device=DEVICE)[:tokens].int()
    norms = [RMSNorm(head_dim, 1e-6) for _ in range(2)]
    for norm in norms:
        norm.weight = torch.nn.Parameter(random(head_dim, dtype=dtype), requires_grad=False)

    q, k, v = heads.split((q_heads, kv_heads, kv_heads), dim=1)
    if normed:
        q, k = norms[0](q), norms[1](k)
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    rotation = Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    expected_k[out_loc.long()], expected_v[out_loc.long()] = rotation.apply(k), v

    weights = (norms[0].weight, norms[1].weight) if normed else None
    out = norm_rope_store(heads, q_heads, weights, 1e-6, table, positions, k_cache, v_cache, out_loc)
    assert_near(out, rotation.apply(q))
    assert_near(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_slots_of_a_pool_of_more_elements_than_int32_counts() -> None:
    """An offset that wrapped around would write to the half before the pool."""
    pool = zeros((2**32 + 128,), torch.float16, DEVICE)[2**31 :].view(-1, 1, 16)
    table, positions = random(1, 16, dtype=torch.float16), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    heads, far = random(1, 3, 16, dtype=torch.float16), 2**31 // 16
    near = torch.zeros(2, 1, 16, dtype=torch.float16, device=DEVICE)
    for cache, slot in ((pool, far), (near, 0)):
        out_loc = torch.tensor([slot], dtype=torch.int32, device=DEVICE)
        norm_rope_store(heads, 1, None, 0.0, table, positions, cache, cache[1:], out_loc)
    assert near.any(dim=2).all(), "K, and V after it"
    assert torch.equal(pool[far : far + 2], near)


class TestSampling:
    vocab = 5000

    def args(self, temperature: float, seeds: list[int], greedy: list[bool] | None = None) -> BatchSamplingArgs:
        rows = len(seeds)
        return BatchSamplingArgs(
            temperatures=torch.full((rows,), temperature, device=DEVICE),
            greedy=None if greedy is None else torch.tensor(greedy, device=DEVICE),
            seeds=torch.tensor(seeds, device=DEVICE),
            positions=torch.arange(rows, device=DEVICE) * 1000,
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_greedy_is_the_first_of_the_highest(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        logits = random(3, self.vocab, dtype=dtype)
        logits[0, [7, 4000]] = 50.0
        logits[1, [2100, 4999]] = 50.0
        tokens = sample_rows(logits, BatchSamplingArgs())
        assert tokens.dtype == torch.int32
        assert tokens.tolist() == [7, 2100, int(logits[2].float().argmax())]

    def test_draws_what_the_reference_draws(self) -> None:
        torch.manual_seed(0)
        seeds = [0, 1, 2**40 + 3, 2**63 - 1, 5, 6, 7, 8]
        logits = random(len(seeds), self.vocab, dtype=torch.float32) * 3
        sampler = Sampler(self.vocab, DEVICE)
        for args in (self.args(0.7, seeds), self.args(1.0, seeds, [i % 2 == 0 for i in range(len(seeds))])):
            scores = logits / args.temperatures[:, None]
            expected = sampler.draw(scores, args)
            if args.greedy is not None:
                expected = torch.where(args.greedy, logits.max(dim=1).indices.int(), expected)
            assert sample_rows(logits, args).tolist() == expected.tolist()

    def test_noise_is_that_of_the_reference(self) -> None:
        """Flat logits: the token is the place of the largest noise; one token lifted by its lead must win or lose."""
        seeds = list(range(40, 60))
        args = self.args(1.0, seeds)
        ids = torch.arange(self.vocab, dtype=torch.int32, device=DEVICE)
        noise = gumbel_noise(args.seeds, args.positions, ids)  # type: ignore[arg-type]
        top = noise.topk(2, dim=1)
        lead = top.values[:, 0] - top.values[:, 1]
        for share, place in ((1 - 1e-4, 0), (1 + 1e-4, 1)):
            logits = torch.zeros(len(seeds), self.vocab, device=DEVICE)
            logits.scatter_(1, top.indices[:, 1:], (lead * share + (1e-5 if place else -1e-5))[:, None])
            assert sample_rows(logits, args).tolist() == top.indices[:, place].tolist()

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        torch.manual_seed(0)
        logits = random(4, self.vocab, dtype=torch.bfloat16)
        all_rows = sample_rows(logits, self.args(0.8, [3, 4, 5, 6])).tolist()
        args = self.args(0.8, [3, 4, 5, 6])
        for row in range(4):
            one = BatchSamplingArgs(
                temperatures=args.temperatures[:1],  # type: ignore[index]
                seeds=args.seeds[row : row + 1],  # type: ignore[index]
                positions=args.positions[row : row + 1],  # type: ignore[index]
            )
            assert sample_rows(logits[row : row + 1], one).tolist() == [all_rows[row]]

    def test_keys_of_shards_are_those_of_the_reference(self) -> None:
        """Of columns from `first` on: the token's own noise, and the key that orders as the score."""
        torch.manual_seed(0)
        logits, first = random(4, self.vocab, dtype=torch.float32) * 3, 2**17 + 1
        logits[0] = torch.zeros(self.vocab, device=DEVICE)
        logits[0, ::2] = -0.0
        ids = torch.arange(first, first + self.vocab, dtype=torch.int32, device=DEVICE)
        args = self.args(0.7, [3, 4, 5, 6], [True, False, False, True])
        warm = logits / 0.7 + gumbel_noise(args.seeds, args.positions, ids)  # type: ignore[arg-type]
        for given in (args, BatchSamplingArgs()):
            scores = logits if given.greedy is None else torch.where(given.greedy[:, None], logits, warm)
            best = scores.max(dim=1)
            keys = best_keys(logits, given, first)
            assert tokens_of(keys).tolist() == (best.indices + first).tolist()
            expected = sort_keys(best.values, best.indices + first)
            assert ((keys - expected).abs() < 64 << 32).all()  # the GPU's logarithm: a few units of the last place
            cold = given.greedy if given.greedy is not None else torch.ones(4, dtype=torch.bool, device=DEVICE)
            assert torch.equal(keys[cold], expected[cold])


def test_params_are_what_prepare_makes_of_them() -> None:
    """The kernel takes what `Sampler.prepare` gives: the same dtypes as here."""
    from minisgl.core.req import Req

    params = [SamplingParams(temperature=0.5, seed=3), SamplingParams()]
    reqs = [Req(i, torch.zeros(4, dtype=torch.int32), p, i) for i, p in enumerate(params)]
    args = Sampler(50, DEVICE).prepare(reqs)
    assert len(sample_rows(torch.randn(2, 50, device=DEVICE), args)) == 2
