"""Where each role of a serving engine lives: roles are spread over stages. Knows only the files' names."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

ROLES: tuple[tuple[str, str, str], ...] = (  # what it is, where, and other words for it
    ("generate loop (naive)", "minisgl/stage1/llm.py", "llm stage forward append"),
    ("static batch (loop)", "minisgl/stage3/llm.py", "group"),
    ("KV cache (contiguous)", "minisgl/stage2/contiguous_cache.py", "keys values"),
    (
        "KV cache (paged pool)",
        "minisgl/stage3/page_pool.py",
        "slot out_loc store scatter page allocator allocate free dummy block",
    ),
    ("page table", "minisgl/stage3/page_table.py", "slot row table_idx assign block_table"),
    ("memory budget (pages)", "minisgl/stage3/engine.py", "memory-ratio num-pages"),
    ("engine", "minisgl/stage3/engine.py", "model runner forward_batch device step"),
    ("pages a request takes", "minisgl/stage3/page_count.py", "page_size"),
    (
        "radix tree (prefix cache)",
        "minisgl/stage4/radix_cache.py",
        "node match split insert lock ref_count unlock evict LRU",
    ),
    ("cache manager", "minisgl/stage4/cache_manager.py", "allocate evict handle cache_req"),
    ("scheduler (continuous batching)", "minisgl/stage5/scheduler.py", "commit retraction retract preempt in_flight"),
    (
        "prefill manager (chunks, admission)",
        "minisgl/stage5/prefill.py",
        "chunked queue waiting --max-prefill-length token budget cut",
    ),
    ("admission (reserve, estimate)", "minisgl/stage5/admission.py", "promised promise room"),
    ("scheduling policies", "minisgl/stage5/policies.py", "policy prefill-first mixed cache-aware fcfs"),
    ("decode manager", "minisgl/stage5/decode.py", "running pages_promised"),
    ("rows and token pool (table manager)", "minisgl/stage5/table.py", "dummy row request"),
    (
        "tensor parallel communicators",
        "minisgl/stage6/communicators.py",
        "parallelism --tp all-reduce all_gather gloo nccl sum",
    ),
    ("sums by NCCL, by shared memory", "minisgl/stage6/communicators_by_name.py", "--comm pynccl symmetric one-shot"),
    ("ranks (start, lock step)", "minisgl/stage6/ranks.py", "group rendezvous"),
    ("orders in lock step (inbox)", "minisgl/stage6/inbox.py", "mailbox broadcast message stop"),
    ("messages between processes", "minisgl/stage8/messages.py", "msgpack encode decode hook heartbeat malformed"),
    ("process launch and watch", "minisgl/stage8/launch.py", "child crash start-up supervisor"),
    ("health (heartbeats, who is well)", "minisgl/stage8/service.py", "heartbeat liveness ready hung 503"),
    ("scheduler process, its ends of the ring", "minisgl/stage8/scheduler_io.py", "desk heartbeat counters"),
    ("sockets (ZMQ)", "minisgl/stage8/sockets.py", "push pull pub sub ipc"),
    ("tokenizer process", "minisgl/stage8/tokenizer.py", "encode"),
    ("tokenizer (text to ids)", "minisgl/core/tokenizer.py", "eos bos special token vocabulary"),
    ("chat template", "minisgl/core/chat_template.py", "jinja conversation prompt"),
    ("detokenizer process", "minisgl/stage8/detokenizer.py", "decode incremental"),
    ("detokenizer (ids to text)", "minisgl/core/detokenizer.py", "incremental half character unicode window"),
    ("stop strings (hold-back)", "minisgl/stage8/stop_strings.py", "held"),
    (
        "server frontend (uids, routing, aborts)",
        "minisgl/stage8/frontend.py",
        "abort cancel disconnect multiplex route",
    ),
    ("HTTP API (OpenAI routes)", "minisgl/stage8/api.py", "endpoint openai key server"),
    ("fields of a request", "minisgl/stage8/openai_protocol.py", "validation body json max_tokens"),
    ("errors of the API", "minisgl/stage8/errors.py", "400 429 503 status"),
    ("server-sent events (SSE, stream)", "minisgl/stage8/sse.py", "streaming chunk"),
    ("server lifecycle (signals, drain)", "minisgl/stage8/serve.py", "shutdown sigterm end"),
    (
        "metrics (Prometheus)",
        "minisgl/stage8/metrics.py",
        "counter latency TTFT time to first token ITL time between tokens",
    ),
    ("command line", "minisgl/core/cli.py", "flags arguments"),
    ("settings (config)", "minisgl/core/config.py", "option dtype threads"),
    ("sampling parameters", "minisgl/core/sampling_params.py", "temperature max_tokens seed stop greedy ignore_eos"),
    ("request (Req)", "minisgl/core/req.py", "uid cached_len device_len extend_len finish_reason in_flight ChunkedReq"),
    ("outputs (Completion, Chunk)", "minisgl/core/outputs.py", "finish_reason usage"),
    ("batch", "minisgl/core/batch.py", "phase mixed prefill decode padded_reqs padding"),
    ("context of a forward", "minisgl/core/context.py", "position input_ids"),
    ("protocols (the seams)", "minisgl/core/protocols.py", "interface backend communicator"),
    ("trace recorder", "minisgl/core/trace.py", "perfetto event span"),
    ("sampler", "minisgl/sampling/sampler.py", "greedy argmax temperature draw token logits"),
    ("filters (top-k, top-p, min-p)", "minisgl/sampling/filters.py", "nucleus top_k top_p min_p"),
    ("penalties, logit bias", "minisgl/sampling/penalties.py", "repetition presence frequency min_tokens"),
    ("random numbers of a draw (seeds)", "minisgl/sampling/noise.py", "gumbel seed noise"),
    ("logprobs", "minisgl/sampling/logprobs.py", "probability"),
    ("tokens without gathered logits", "minisgl/sampling/vocab_parallel.py", "vocabulary parallel greedy over shards"),
    (
        "attention (paged, reference)",
        "minisgl/attention/paged_torch.py",
        "GQA metadata backend query keys values gather",
    ),
    ("attention (choice of backend, --attn)", "minisgl/attention/choose.py", "flashinfer flashattention trtllm"),
    ("attention (kernels of ours)", "minisgl/attention/triton_kernels.py", "triton flash decode running softmax"),
    ("page table as kernels read it", "minisgl/attention/views.py", "cu_seqlens metadata ragged indptr"),
    ("linear layers, sharded", "minisgl/layers/linear.py", "column row parallel qkv_proj o_proj bias"),
    ("shards (what a rank holds)", "minisgl/layers/shard.py", "heads GQA KV heads copies range"),
    ("embedding and head", "minisgl/layers/embedding.py", "vocabulary lm_head logits tied"),
    ("RMSNorm", "minisgl/layers/norm.py", "norm residual"),
    ("RoPE (rotary embedding)", "minisgl/layers/rotary.py", "position rotation"),
    ("decoder layer (attention, MLP)", "minisgl/models/blocks.py", "gate up down transformer residual"),
    ("experts (MoE)", "minisgl/moe/layer.py", "mixture router grouped gemm"),
    ("kernels: rows, norms, RoPE, sampling", "minisgl/kernel/triton_rows.py", "triton cuda fused gemv early launch"),
    ("models by architecture (registry)", "minisgl/models/registry.py", "llama qwen mistral"),
    ("model configuration", "minisgl/models/config.py", "config.json"),
    ("weights loader", "minisgl/models/weights.py", "safetensors checkpoint load read"),
    ("built-in model", "minisgl/models/builtin.py", "smollm2 download"),
    ("overlap (the loop)", "minisgl/stage7/llm.py", "overlap_loop schedule"),
    ("overlap (a step in flight)", "minisgl/stage7/overlap.py", "in_flight launch commit"),
    ("overlap (streams)", "minisgl/stage7/streams.py", "event wait copy_done"),
    ("CUDA graphs (graph runner)", "minisgl/stage7/graph_runner.py", "capture replay padding launch"),
    ("simulated engine, cost model", "minisgl/stage5/simulated_engine.py", "virtual clock capacity"),
    ("exercises (start, check, hint)", "minisgl/learn/commands.py", "diff progress"),
    ("exercises: a learner's code in place (--mine)", "minisgl/learn/install.py", "exercise"),
    ("bug hunts", "minisgl/learn/bugs.py", "mutant"),
    ("figures", "minisgl/viz/__init__.py", "timeline gantt plot bubble"),
    ("benchmarks", "minisgl/benchmark/__main__.py", "measure throughput goodput workload"),
)

ENDINGS = ("s", "es", "ed", "ing")


def main(argv: Sequence[str]) -> int:
    """`minisgl where [WORD …]`: the roles that have all the words in their name, their file or their other words, or
    all roles. How a word is spelt (top-p, top_p, Retractions) matters little."""
    words = _plain(" ".join(argv)).split()
    found = [role for role in ROLES if all(_has(_text(role), word) for word in words)]
    for name, file, _ in found:
        print(f"{name:46}{file}")
    if not found:
        print(f"no role has {' '.join(argv)!r:.80}: `minisgl where` lists all", file=sys.stderr)
    return 0 if found else 1


def _text(role: tuple[str, str, str]) -> str:
    name, file, words = role
    return _plain(f"{name} {file.removeprefix('minisgl/')} {words}")


def _has(text: str, word: str) -> bool:
    """A word of the text begins with this one, or with what it is without its ending."""
    stems = [word, *(word.removesuffix(ending) for ending in ENDINGS)]
    return any(re.search(rf"\b{re.escape(stem)}", text) for stem in stems if len(stem) >= min(4, len(word)))


def _plain(text: str) -> str:
    return text.lower().replace("-", " ").replace("_", " ")
