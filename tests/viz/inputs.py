"""Small made-up runs: a trace with every kind of event, page snapshots, a radix tree, and each figure drawn of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from matplotlib.figure import Figure

from minisgl import viz
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Event
from minisgl.stage3.page_pool import PageAllocator
from minisgl.stage3.page_table import PageTable
from minisgl.stage4.radix_cache import RadixCache
from minisgl.stage5.cost_model import H200

MS = 1_000_000


def server_trace(requests: int = 3, steps: int = 6, ranks: int = 1) -> list[Event]:
    """Each step takes 2 ms of schedule and 3 ms of the engine; the first is a prefill. Times start at 7 s."""
    events: list[Event] = []
    start = 7_000 * MS

    def add(name: str, kind: Any, at: float, track: str, uid: int | None = None, **fields: Any) -> None:
        ends = {"duration": fields.pop("duration")} if "duration" in fields else {}
        place = {"role": fields.pop("role", "scheduler"), "rank": fields.pop("rank", 0)}
        events.append(Event(name, kind, start + round(at * MS), track, uid, fields, **ends, **place))

    for uid in range(requests):
        add("Tokenize", "i", 0, "messages", uid, role="main")
        add("Generate", "i", 0.5, "messages", uid, role="tokenizer")
    for rank in range(ranks):
        for uid in range(requests):
            add("queued", "b", 1, "requests", uid, rank=rank)
            add("queued", "e", 2, "requests", uid, rank=rank)
            add("prefill", "b", 2, "requests", uid, rank=rank)
            add("prefill", "e", 7, "requests", uid, rank=rank)
            add("decode", "b", 7, "requests", uid, rank=rank)
            add("decode", "e", 2 + 5 * steps, "requests", uid, rank=rank)
        for step in range(steps):
            at, phase = 2 + 5 * step, "decode" if step else "prefill"
            plan = {"step": step + 1, "phase": phase, "requests": requests, "padded": requests + step % 2}
            add("schedule", "X", at, "scheduler", duration=2 * MS, rank=rank, **plan)
            tokens = requests * (1 if step else 10)
            add("forward", "X", at + 2, "engine", duration=3 * MS, rank=rank, step=step + 1, tokens=tokens)
            add("pages", "C", at + 1, "counters", rank=rank, free=40 - step, rows=step, evictable=2, protected=8)
    for step in range(steps):
        for uid in range(requests):
            add("Step", "i", 7 + 5 * step, "messages", uid)
            add("Replies", "i", 7.5 + 5 * step, "messages", uid, role="detokenizer")
    for uid in range(min(requests, 9)):  # each takes two pages; the second shares its first page with the first
        add("row_pages", "i", 2, "cache", uid, start=0, pages=[0 if uid == 1 else 2 * uid, 2 * uid + 1])
    add("row_pages", "i", 20, "cache", 0, start=0, pages=[])
    add("free_pages", "i", 21, "cache", pages=[1])
    return sorted(events, key=lambda event: event.ts)


def launched(kernels: int, graph: bool) -> list[Event]:
    """A step's kernels of 2 µs each: launched one by one, 6 µs apart, or by one call after the first."""
    us, events = MS // 1000, []
    launches = 2 if graph else kernels
    for number in range(launches):
        at = 7000 * MS + 6 * us * number
        events.append(Event("cudaLaunchKernel", "X", at, "launches", args={"launch": number}, duration=4 * us))
    for number in range(kernels):
        at = 7000 * MS + (20 + 2 * number if graph else 5 + 6 * number) * us
        args = {"launch": min(number, launches - 1)}
        events.append(Event("norm", "X", at, "stream 7", args=args, duration=2 * us))
    return events


def layers_of_ranks(num_layers: int = 4, ranks: int = 2) -> list[Event]:
    """Each part of a layer computes for 8 µs, of which 6 in kernels, and then meets; rank 1 for 10. They meet for 5 µs
    when both are there."""
    us, events = MS // 1000, []
    parts: list[dict[str, Any]] = [{"part": "embedding"}]
    parts += [{"part": part, "layer": layer} for layer in range(num_layers) for part in ("attention", "mlp")]
    for rank in range(ranks):
        at = 7000 * MS

        def add(name: str, length: int, place: dict[str, Any], busy: int, rank: int = rank) -> None:
            nonlocal at
            args = {**place, "busy_ns": busy * us}
            events.append(Event(name, "X", at, "device", args=args, duration=length * us, role="rank", rank=rank))
            at += length * us

        for place in parts:
            own = 8 + 2 * rank
            add("compute", own, place, 6)
            if ranks > 1:
                add("all-reduce", 5 + (6 + 2 * ranks) - own, place, 5)
        add("compute", 4, {"part": "head"}, 4)
    return events


def alone_trace(recompute: bool) -> list[Event]:
    """Stage 1 or 2: one request of 64 + 64 tokens."""
    events = []
    for step in range(64):
        name, tokens = ("forward", 64 + step) if recompute else ("prefill", 64) if step == 0 else ("decode", 1)
        event = Event(name, "X", 10 * MS * step, "engine", 0, {"tokens": tokens}, duration=MS * (1 + tokens // 16))
        events.append(event)
    return events


def pool_with_rows(num_pages: int = 24) -> tuple[PageTable, PageAllocator, list[Req]]:
    """Three requests whose pages are mixed in the pool."""
    table = PageTable(4, 64, 4, num_pages * 4, torch.device("cpu"))
    allocator = PageAllocator(num_pages)
    lengths = (11, 6, 17)
    params = SamplingParams(max_tokens=30)
    reqs = [Req(uid, torch.zeros(n, dtype=torch.int32), params, uid) for uid, n in enumerate(lengths)]
    for _ in range(9):
        table.assign(reqs, allocator.allocate(sum(map(table.pages_needed, reqs))))
        for req in reqs:
            req.complete_one()
    return table, allocator, reqs


def page_run() -> list[viz.PageSnapshot]:
    """A row that begins with another's page, and pages that only the prefix cache has."""
    rows = {0: [0, 1], 1: [0, 2, 3], 7: [4]}
    first = viz.PageSnapshot(12, {0: [0, 1]}, frozenset({9}), 0.001)
    return [
        first,
        viz.PageSnapshot(12, rows, frozenset({0, 9, 10}), 0.003),
        viz.PageSnapshot(12, {7: [4, 5]}, time=0.004),
    ]


def tree_run() -> list[viz.TreeSnapshot]:
    cache, slots = RadixCache(4), iter(range(0, 1000, 100))

    def insert(text: str) -> Callable[[RadixCache], object]:
        first = next(slots)
        ids = torch.tensor(list(text.encode()), dtype=torch.int32)
        return lambda cache: cache.insert_prefix(ids, torch.arange(first, first + len(ids), dtype=torch.int32))

    pirate = torch.tensor(list(b"the cat sat on the mat."), dtype=torch.int32)
    return viz.radix_steps(
        cache,
        [
            ("insert", insert("the cat sat on the mat.")),
            ("insert", insert("the cat sat down and cried")),
            ("insert", insert("you are a helpful pirate who speaks Chinese: 你好")),
            ("match", lambda cache: cache.match_prefix(pirate)),
            ("lock", lambda cache: cache.lock(cache.match_prefix(pirate))),
            ("evict", lambda cache: cache.evict(4)),
            ("match", lambda cache: cache.match_prefix(pirate.flip(0))),
        ],
    )


def decode(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def token_name(ids: list[int]) -> str:
    return [" Paris", "\n", "$x$", "中", "a token that is long"][ids[0]] if ids[0] < 5 else f" w{ids[0]}"


def logits() -> torch.Tensor:
    return torch.linspace(6, -6, 400)


MODEL = SimpleNamespace(
    num_heads=9, num_kv_heads=3, intermediate_size=1536, vocab_size=49152, hidden_size=576, head_dim=64
)
WIDE = SimpleNamespace(
    num_heads=32, num_kv_heads=4, intermediate_size=11008, vocab_size=151936, hidden_size=4096, head_dim=128
)
DRAWN = SamplingParams(temperature=0.8, top_k=50, top_p=0.9)
POINTS = {"decode, 1 request": (270e6, 280e6), "decode, 64 requests": (17e9, 420e6), "prefill": (138e9, 300e6)}
GIB = 2**30

Draw = Callable[[Any], Figure]  # of a size
FIGURES: dict[str, Draw] = {
    "gantt": lambda size: viz.gantt(server_trace(), at=0.01, size=size),
    "gantt of 40 requests": lambda size: viz.gantt(server_trace(40), size=size),
    "batch": lambda size: viz.batch_composition(server_trace(), size=size),
    "timeline": lambda size: viz.timeline(server_trace(), size=size),
    "timelines": lambda size: viz.timeline({"off": server_trace(), "on": server_trace(ranks=2)}, size=size),
    "page usage": lambda size: viz.page_usage(server_trace(), size=size),
    "page map": lambda size: viz.page_map(page_run(), size=size),
    "page map of a trace": lambda size: viz.page_map(viz.page_snapshots(server_trace(9)), size=size),
    "page map of a large pool": lambda size: viz.page_map(viz.page_snapshots(server_trace(9), 7000), size=size),
    "page grid": lambda size: viz.page_grid(page_run()[1], size=size),
    "page grid of 200": lambda size: viz.page_grid(viz.PageSnapshot(200, {0: list(range(90))}), size=size),
    "page table": lambda size: viz.page_table(pool_with_rows()[0], pool_with_rows()[2], 24, size=size),
    "memory waste": lambda size: viz.memory_waste({0: 100, 1: 37, 2: 250, 3: 12, 4: 88}, 512, 16, size=size),
    "memory budget": lambda size: viz.memory_budget(
        {"weights": 16 * GIB, "KV pages": 54 * GIB, "rest": GIB}, size=size
    ),
    "cache bytes": lambda size: viz.cache_bytes({"a": 46080, "b": 138240}, 8192, model_bytes=538 << 20, size=size),
    "radix tree": lambda size: viz.radix_tree(tree_run()[5], decode, size=size),
    "radix split": lambda size: viz.radix_tree(tree_run()[2], size=size),
    "empty radix tree": lambda size: viz.radix_tree(RadixCache(4), size=size),
    "triangles": lambda size: viz.cost_triangles({"Stage 1": [*range(64, 128)], "Stage 2": [64, *[1] * 63]}, size=size),
    "time per token": lambda size: viz.time_per_token({"Stage 1": viz.step_seconds(alone_trace(True), 0)}, size=size),
    "roofline": lambda size: viz.roofline(POINTS, H200, seconds={"decode, 1 request": 2e-3}, size=size),
    "logits": lambda size: viz.logits_to_token(logits(), DRAWN, token_name, chosen=4, size=size),
    "distribution": lambda size: viz.distribution({"off": [0.1, 0.2, 0.4], "on": [0.1, 0.15]}, size=size),
    "histogram": lambda size: viz.distribution({"": [1e-4, 2e-4]}, histogram=True, size=size),
    "latency": lambda size: viz.latency(server_trace(), size=size),
    "shards": lambda size: viz.shards(MODEL, 2, size=size),
    "shards, replicated": lambda size: viz.shards(WIDE, 8, size=size),
    "layer on ranks": lambda size: viz.layer_on_ranks(MODEL, 2, size=size),
    "layer on many ranks": lambda size: viz.layer_on_ranks(WIDE, 8, size=size),
    "launch tax": lambda size: viz.launch_tax(
        {"eager": (0.0021, 0.0078), "one CUDA graph": (0.0021, 0.0022)}, size=size
    ),
    "launches": lambda size: viz.launches(
        {"kernel by kernel": launched(90, False), "one CUDA graph": launched(90, True)}, size=size
    ),
    "recorded layers": lambda size: viz.recorded_layers(layers_of_ranks(), size=size),
    "recorded layers of many ranks": lambda size: viz.recorded_layers(
        layers_of_ranks(ranks=8), first=0, count=4, size=size
    ),
    "time parts": lambda size: viz.time_parts(
        {"tp 1": {"compute": 2e-3, "communication": 0}, "tp 2": {"compute": 1e-3, "communication": 4e-4}}, size=size
    ),
    "goodput": lambda size: viz.goodput({"mixed": {10: 10, 40: 31.5}, "prefill-first": {10: 9.5, 40: 2}}, size=size),
    "goodput, pages": lambda size: viz.goodput(
        {"estimate": {1000: 3, 8000: 30}}, offered=30, quantity="pages", size=size
    ),
    "token times": lambda size: viz.token_times({"off": [1.0, 1.1, 1.9], "on": [1.0, 1.2, 1.4]}, size=size),
    "journey": lambda size: viz.journey(server_trace(), 1, size=size),
}
