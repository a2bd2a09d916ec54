"""Where each role of a serving engine lives: roles are spread over stages. Knows only the files' names."""

from __future__ import annotations

import sys
from collections.abc import Sequence

ROLES: tuple[tuple[str, str], ...] = (
    ("generate loop (naive)", "minisgl/stage1/llm.py"),
    ("KV cache (contiguous)", "minisgl/stage2/contiguous_cache.py"),
    ("KV cache (paged pool)", "minisgl/stage3/page_pool.py"),
    ("page table", "minisgl/stage3/page_table.py"),
    ("engine", "minisgl/stage3/engine.py"),
    ("radix tree (prefix cache)", "minisgl/stage4/radix_cache.py"),
    ("cache manager", "minisgl/stage4/cache_manager.py"),
    ("scheduler (continuous batching)", "minisgl/stage5/scheduler.py"),
    ("prefill manager (chunks, admission)", "minisgl/stage5/prefill.py"),
    ("decode manager", "minisgl/stage5/decode.py"),
    ("rows and token pool (table manager)", "minisgl/stage5/table.py"),
    ("tensor parallel communicators", "minisgl/stage6/communicators.py"),
    ("ranks (start, lock step)", "minisgl/stage6/ranks.py"),
    ("messages between processes", "minisgl/stage8/messages.py"),
    ("process launch and watch", "minisgl/stage8/launch.py"),
    ("tokenizer process", "minisgl/stage8/tokenizer.py"),
    ("detokenizer process", "minisgl/stage8/detokenizer.py"),
    ("server frontend (uids, routing, aborts)", "minisgl/stage8/frontend.py"),
    ("HTTP API (OpenAI routes)", "minisgl/stage8/api.py"),
    ("server-sent events (SSE, stream)", "minisgl/stage8/sse.py"),
    ("server lifecycle (signals, drain)", "minisgl/stage8/serve.py"),
    ("command line", "minisgl/core/cli.py"),
    ("settings (config)", "minisgl/core/config.py"),
    ("sampling parameters", "minisgl/core/sampling_params.py"),
    ("request (Req)", "minisgl/core/req.py"),
    ("batch", "minisgl/core/batch.py"),
    ("trace recorder", "minisgl/core/trace.py"),
    ("sampler", "minisgl/sampling/sampler.py"),
    ("attention (paged, reference)", "minisgl/attention/paged_torch.py"),
    ("linear layers, sharded", "minisgl/layers/linear.py"),
    ("RoPE (rotary embedding)", "minisgl/layers/rotary.py"),
    ("experts (MoE)", "minisgl/moe/layer.py"),
    ("models by architecture (registry)", "minisgl/models/registry.py"),
    ("weights loader", "minisgl/models/weights.py"),
    ("built-in model", "minisgl/models/builtin.py"),
    ("overlap (streams)", "minisgl/stage7/streams.py"),
    ("CUDA graphs (graph runner)", "minisgl/stage7/graph_runner.py"),
    ("simulated engine, cost model", "minisgl/stage5/simulated_engine.py"),
    ("exercises (start, check, hint)", "minisgl/learn/commands.py"),
    ("exercises: a learner's code in place (--mine)", "minisgl/learn/install.py"),
    ("figures", "minisgl/viz/__init__.py"),
    ("benchmarks", "minisgl/benchmark/__main__.py"),
)


def main(argv: Sequence[str]) -> int:
    """`minisgl where [WORD …]`: the roles that have all the words in their name or file, or all of them."""
    words = [word.lower() for word in argv]
    found = [role for role in ROLES if all(word in " ".join(role).lower() for word in words)]
    for name, file in found:
        print(f"{name:42}{file}")
    if not found:
        print(f"no role has {' '.join(argv)!r:.80}: `minisgl where` lists all", file=sys.stderr)
    return 0 if found else 1
