"""Figures from traces and from live objects, all in one style. No part of the server knows of them.

Each figure is a function that returns a matplotlib Figure; all take `title` (None: the finding is computed) and `size`.
"""

import sys

from minisgl.core.interrupt import leave_on_interrupt

if sys.argv[:1] == ["-m"]:  # `python -m minisgl.viz` loads this package before its __main__
    leave_on_interrupt()  # before the imports, which take seconds

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    if sys.argv[:1] == ["-m"]:
        print("figures need matplotlib: python3 dev/setup.py notebooks", file=sys.stderr)
        sys.exit(2)
    raise ImportError("figures need matplotlib: pip install 'minisgl[notebooks]'") from error

from minisgl.viz.cost import cost_triangles, roofline, time_per_token
from minisgl.viz.distributions import distribution, latencies, latency
from minisgl.viz.goodput import goodput
from minisgl.viz.launches import LaunchedStep, launched_step, launches
from minisgl.viz.layer_on_ranks import layer_on_ranks
from minisgl.viz.memory import budget_parts, cache_bytes, memory_budget, memory_waste
from minisgl.viz.page_figures import page_grid, page_map, page_usage
from minisgl.viz.page_table_figure import page_table
from minisgl.viz.pages import PageSnapshot, page_snapshots, snapshot_pages, snapshot_scheduler
from minisgl.viz.processes import journey
from minisgl.viz.radix_figure import radix_tree
from minisgl.viz.radix_steps import TreeSnapshot, radix_steps, snapshot_tree
from minisgl.viz.reading import request_spans, step_seconds, step_tokens, steps
from minisgl.viz.recorded_layers import recorded_layers, step_parts
from minisgl.viz.requests import batch_composition, gantt
from minisgl.viz.sampling import logits_to_token
from minisgl.viz.shards import shards
from minisgl.viz.slider import slider
from minisgl.viz.streams import token_times
from minisgl.viz.style import request_color
from minisgl.viz.time_parts import launch_tax, time_parts
from minisgl.viz.timeline import timeline

__all__ = [
    "LaunchedStep",
    "PageSnapshot",
    "TreeSnapshot",
    "batch_composition",
    "budget_parts",
    "cache_bytes",
    "cost_triangles",
    "distribution",
    "gantt",
    "goodput",
    "journey",
    "latencies",
    "latency",
    "launch_tax",
    "launched_step",
    "launches",
    "layer_on_ranks",
    "logits_to_token",
    "memory_budget",
    "memory_waste",
    "page_grid",
    "page_map",
    "page_snapshots",
    "page_table",
    "page_usage",
    "radix_steps",
    "radix_tree",
    "recorded_layers",
    "request_color",
    "request_spans",
    "roofline",
    "shards",
    "slider",
    "snapshot_pages",
    "snapshot_scheduler",
    "snapshot_tree",
    "step_parts",
    "step_seconds",
    "step_tokens",
    "steps",
    "time_parts",
    "time_per_token",
    "timeline",
    "token_times",
]
