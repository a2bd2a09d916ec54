"""Stage 1's exercises, each claim in words: norm, rotation, attention, sampling, the loop.

They hold for the package's own code; `minisgl check 1` runs them on a learner's.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_model import make_tiny_model
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from wrong import equal

from minisgl.attention.recompute import RecomputeAttention
from minisgl.core.sampling_params import SamplingParams
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotation
from minisgl.sampling.filters import TokenFilters
from minisgl.stage1.llm import LLM

INF = math.inf


def norm(size: int, weight: float = 1.0, eps: float = 0.0, dtype: torch.dtype = torch.float32) -> RMSNorm:
    layer = RMSNorm(size, eps).requires_grad_(False)
    layer.weight.data = torch.full((size,), weight, dtype=dtype)
    return layer


def test_a_row_of_threes_and_fours() -> None:
    out = norm(4, weight=2.0)(torch.tensor([3.0, 4.0, 3.0, 4.0]))
    rms = math.sqrt((9 + 16) / 2)
    equal(out, [6 / rms, 8 / rms, 6 / rms, 8 / rms], "rms([3, 4, 3, 4]) is √12.5: each element over that, times 2")


def test_each_token_has_a_norm_of_its_own() -> None:
    x = torch.tensor([[1.0, -1.0], [100.0, 100.0]])
    equal(norm(2)(x), [[1, -1], [1, 1]], "two tokens; their scales must not mix, as in a mean without keepdim=True")


def test_eps_is_added_under_the_root() -> None:
    out = norm(1, eps=0.25)(torch.tensor([[0.0], [0.5]]))
    equal(out, [[0], [0.5 / math.sqrt(0.5)]], "x / √(mean(x²) + eps) with eps 0.25: eps belongs under the root")


def test_squares_are_summed_in_float32() -> None:
    out = norm(2, dtype=torch.float16)(torch.tensor([[300.0, -300.0]], dtype=torch.float16))
    assert out.dtype == torch.float16, f"x is float16, and so is what comes back, not {out.dtype}"
    equal(out, [[1, -1]], "300² is 90,000, and float16 ends at 65,504: square and sum in float32, not in x's own dtype")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    """A quotient that differs in its last bit of float32 is right, and in bfloat16 it hardly ever shows. A rounding
    in another place does: in one element of four."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 48).to(dtype), (torch.rand(48) + 0.5).to(dtype)
    ours, theirs = norm(48, eps=1e-3, dtype=dtype), LlamaRMSNorm(48, 1e-3).requires_grad_(False)
    ours.weight.data = theirs.weight.data = weight
    before = x.clone()
    came, expected = ours(x), theirs(x)
    assert torch.equal(x, before), "the input is somebody's residual: it must not change"
    equal(came, expected, "the norm is not that of transformers")
    differ = float((came != expected).float().mean())
    assert dtype == torch.float32 or differ < 0.02, (
        f"in bfloat16 {differ:.0%} of the elements differ in their last bits: a rounding is in another place"
    )


def turn(angle: float, head_dim: int = 4) -> Rotation:
    """Every pair by the same angle."""
    cos, sin = math.cos(angle), math.sin(angle)
    half = head_dim // 2
    return Rotation(torch.full((1, 1, head_dim), cos), torch.tensor([[[-sin] * half + [sin] * half]]))


def test_a_quarter_turn() -> None:
    x = torch.tensor([[[1.0, 2.0, 30.0, 40.0], [5.0, 6.0, 0.0, 0.0]]])
    out = turn(math.pi / 2).apply(x)
    words = "a quarter turn takes the pair (a, b) to (-b, a)"
    if torch.allclose(out, torch.tensor([[[-2.0, 1, -40, 30], [-6, 5, 0, 0]]]), atol=1e-4):
        words += "; here neighbours were turned as pairs"
    elif torch.allclose(out, torch.tensor([[[30.0, 40, -1, -2], [0, 0, -5, -6]]]), atol=1e-4):
        words += "; here it was turned the other way round"
    equal(out, [[[-30, -40, 1, 2], [0, 0, 5, 6]]], words + ", where a is x[i] and b is x[i + head_dim / 2]")


def test_position_0_is_not_turned() -> None:
    x = torch.randn(1, 3, 8)
    equal(turn(0.0, 8).apply(x), x, "an angle of 0 leaves every head as it is")


def test_a_turn_keeps_the_length() -> None:
    x = torch.randn(1, 3, 8)
    before = x.clone()
    out = turn(0.7, 8).apply(x)
    equal(out.norm(dim=-1), x.norm(dim=-1), "a rotation does not change the length of a head")
    equal(x, before, "x itself must not change: turn a copy")


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = RecomputeAttention().attend(q, k, v)
    assert out.shape == q.shape, f"q is {list(q.shape)}, and so is what comes back, not {list(out.shape)}"
    assert not out.isnan().any(), "nan came out: a row of scores was all -inf. A token always sees itself"
    return out


def test_attention_of_one_token_is_its_value() -> None:
    v = torch.randn(1, 2, 4)
    equal(attend(torch.randn(1, 2, 4), torch.randn(1, 2, 4), v), v, "alone, a token gives all its weight to itself")


def test_no_token_sees_the_future() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 2, 4)
    first = attend(q, k, v)[:3]
    k[3:], v[3:] = 50.0, 1000.0
    equal(
        attend(q, k, v)[:3], first, "tokens 3 and 4 were changed, and what 0 to 2 see changed too: that is the future"
    )
    k, v = torch.zeros(5, 2, 4), torch.arange(5.0)[:, None, None].expand(5, 2, 4)
    means = torch.arange(5.0)[:, None, None].expand(5, 2, 4) / 2
    equal(
        attend(q, k, v),
        means,
        "with equal scores token i sees the mean of 0 … i, itself included: no more of the future",
    )


def test_heads_of_a_group_share_a_kv_head() -> None:
    v = torch.tensor([[[10.0, 10.0], [20.0, 20.0]]])  # one token, two KV heads
    out = attend(torch.randn(1, 4, 2), torch.randn(1, 2, 2), v)[0, :, 0]
    words = "4 query heads, 2 KV heads: heads 0 and 1 read KV head 0, heads 2 and 3 read KV head 1"
    if out.tolist() == [10, 20, 10, 20]:
        words += ". Here each takes turns"
    equal(out, [10, 10, 20, 20], words)


def test_scores_are_divided_by_the_root_of_head_dim() -> None:
    q = torch.full((2, 1, 16), 1.0)
    k = torch.stack((torch.zeros(1, 16), torch.full((1, 16), 1.0)))  # dot products 0 and 16
    v = torch.stack((torch.zeros(1, 16), torch.ones(1, 16)))
    weight = 1 / (1 + math.exp(-16 / 4))
    equal(
        attend(q, k, v)[1, 0, 0],
        weight,
        "q·k is 16 and head_dim is 16: the score is 16 / √16 = 4, by the root of head_dim",
    )


RANKED = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()  # probabilities, the highest first


def test_top_k_is_the_kth_highest_score() -> None:
    ranked = torch.tensor([[9.0, 7.0, 5.0, 3.0], [8.0, 6.0, 4.0, 2.0]])
    out = TokenFilters().top_k_threshold(ranked, torch.tensor([1, 3]))
    equal(out, [[9], [4]], "top_k is 1 and 3: the 1st of row 0, the 3rd of row 1, as [rows, 1]. Off by one?")


def test_top_k_longer_than_what_is_ranked_cuts_nothing() -> None:
    out = TokenFilters().top_k_threshold(RANKED, torch.tensor([5]))
    equal(out, [[-INF]], "4 scores are ranked and top_k is 5: this row keeps all, so its threshold is -inf")


def top_p(p: float) -> Tensor:
    return TokenFilters().top_p_threshold(RANKED, torch.zeros(1, 1), torch.tensor([p]))


def test_the_token_that_crosses_top_p_stays() -> None:
    words = (
        "probabilities 0.5, 0.25, 0.15, 0.1 and top_p 0.6: 0.5 is not enough, so the token that crosses it stays too"
    )
    equal(top_p(0.6).exp(), [[0.25]], words)
    total = torch.tensor([[1.0]])
    out = TokenFilters().top_p_threshold(RANKED + 1.0, total, torch.tensor([0.6]))
    equal(out, RANKED[:, 1:2] + 1.0, "scores are no log-probabilities yet: subtract log_total, and return a score")


def test_the_first_token_always_stays() -> None:
    equal(top_p(0.01).exp(), [[0.5]], "top_p 0.01 is less than any probability: the first token stays all the same")


def test_top_p_1_cuts_nothing() -> None:
    equal(top_p(1.0), [[-INF]], "top_p 1 keeps all, also what is not ranked: its threshold is -inf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm(folder: Path):  # type: ignore[no-untyped-def]
    with LLM(str(folder), dtype="float32") as made:
        yield made


def test_the_loop_yields_each_token_when_it_is_there(llm: LLM) -> None:
    made = []
    next_token = llm._next_token
    llm._next_token = lambda req: made.append(req.uid) or next_token(req)  # type: ignore[method-assign,func-returns-value]
    stream = llm.stream([[1, 2, 3], [4]], SamplingParams(max_tokens=5, ignore_eos=True))
    chunk = next(stream)
    assert len(made) == 1, f"{len(made)} tokens were made before the first was shown: it came only when all were made"
    assert chunk.token_ids, "a chunk without a token came first"
    stream.close()


def test_the_loop_ends_with_the_last_token(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 4)]
    done = llm.generate([[1, 2, 3], [4]], params)
    lengths = [len(completion.token_ids) for completion in done]
    assert lengths == [1, 4], f"max_tokens 1 and 4, and the answers have {lengths} tokens"
    reasons = [completion.finish_reason for completion in done]
    assert reasons == ["length", "length"], f"both ended because of their length, not {reasons}"


def test_the_loop_stops_at_the_end_of_sequence(llm: LLM) -> None:
    llm._next_token = lambda req: 65 if req.output_len < 2 else 257  # type: ignore[method-assign]  # 257 is <eos>
    (done,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=9))
    assert done.token_ids == [65, 65, 257], (
        f"A, A, <eos>: it goes on to the end of sequence and no further: {done.token_ids}"
    )
    assert done.finish_reason == "stop", f"it ended with <eos>, whose reason is 'stop', not {done.finish_reason!r}"


def test_every_step_computes_all_tokens(llm: LLM) -> None:
    seen = []
    context = llm._context
    llm._context = lambda ids: seen.append(len(ids)) or context(ids)  # type: ignore[method-assign,func-returns-value]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert seen == [3, 4, 5, 6], f"the forwards of a prompt of 3 have 3, 4, 5 and 6 tokens, not {seen}"


def test_a_seeded_draw_knows_its_position(llm: LLM) -> None:
    positions = []
    prepare = llm.sampler.prepare
    llm.sampler.prepare = lambda reqs, *more: positions.append(reqs[0].device_len) or prepare(reqs, *more)  # type: ignore[method-assign]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert positions == [3, 4, 5], f"device_len before each step is 3, 4 and 5: it counts every token, here {positions}"
