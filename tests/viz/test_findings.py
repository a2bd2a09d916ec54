"""What figures say is what the run did: steps, states, pages, latencies, bubbles, probabilities. Titles tell it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from inputs import (
    FIGURES,
    GIB,
    MODEL,
    MS,
    POINTS,
    WIDE,
    alone_trace,
    launched,
    layers_of_ranks,
    logits,
    page_run,
    pool_with_rows,
    server_trace,
    token_name,
    tree_run,
)
from tiny_model import make_tiny_model

from minisgl import viz
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.trace import Event
from minisgl.stage4.radix_cache import RadixCache
from minisgl.stage5.cost_model import H200
from minisgl.stage5.llm import LLM
from minisgl.viz.sampling import probabilities


def test_triangles_are_those_of_the_claim() -> None:
    counts = {f"Stage {n}": viz.step_tokens(alone_trace(n == 1), 0) for n in (1, 2)}
    assert {name: sum(steps) for name, steps in counts.items()} == {"Stage 1": 6112, "Stage 2": 127}
    title = viz.cost_triangles(counts).get_suptitle()
    assert title == "Stage 2 computes 127 tokens where Stage 1 computes 6,112"


@pytest.mark.parametrize(("names", "spared"), [(["Stage 1"], False), (["Stage 1", "Stage 2"], True)])
def test_a_legend_names_only_what_is_drawn(names: list[str], spared: bool) -> None:
    figure = viz.cost_triangles({name: viz.step_tokens(alone_trace(name == "Stage 1"), 0) for name in names})
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *[f"computed, {name}" for name in names],
        *["not computed again"] * spared,
    ]


def test_steps() -> None:
    steps = viz.steps(server_trace(requests=3, steps=6))
    assert [(step.decode, step.extend) for step in steps] == [(0, 30)] + [(3, 0)] * 5
    assert steps[1].start == pytest.approx(0.009)
    assert steps[1].end == pytest.approx(0.012)


def test_mixed_step_needs_its_decode_tokens() -> None:
    mixed = Event("mixed", "X", 0, "engine", args={"tokens": 9}, duration=5)
    with pytest.raises(ValueError, match=r"step 1 \(mixed\) of the trace does not say its decode"):
        viz.steps([mixed])
    known = Event("mixed", "X", 0, "engine", args={"tokens": 9, "decode": 2}, duration=5)
    assert viz.steps([known])[0][2:4] == (2, 7)


def test_padding_of_a_graph() -> None:
    plan = Event("schedule", "X", 0, "scheduler", args={"step": 1, "phase": "decode", "requests": 3, "padded": 8})
    (step,) = viz.steps([plan, Event("forward", "X", 1, "engine", args={"step": 1, "tokens": 3}, duration=5)])
    assert (step.decode, step.padding) == (3, 5)


def test_request_states_of_one_rank_only() -> None:
    alone, both = viz.request_spans(server_trace()), viz.request_spans(server_trace(ranks=2))
    assert alone == both
    assert [span.state for span in alone if span.uid == 1] == ["queued", "prefill", "decode"]
    assert alone[0].end - alone[0].start == pytest.approx(0.001)


def test_state_that_never_ends_lasts_to_the_end() -> None:
    events = [event for event in server_trace() if not (event.name == "decode" and event.phase == "e")]
    last = max(event.ts + (event.duration or 0) for event in events) - events[0].ts
    ends = {span.end for span in viz.request_spans(events) if span.state == "decode"}
    assert list(ends) == pytest.approx([last / 1e9])


def test_bubbles_are_two_parts_of_five() -> None:
    """3 ms of each 5 ms the engine runs; the last step ends without a bubble: 10 of 28 ms."""
    assert "36 % of the time of 6 steps" in viz.timeline(server_trace()).get_suptitle()
    assert "25 % of the time of 2 steps" in viz.timeline(server_trace(), first=2, count=2).get_suptitle()  # 2 of 8 ms
    both = viz.timeline({"off": server_trace(), "on": server_trace(ranks=2)}).get_suptitle().replace("\n", " ")
    assert both.endswith("36 % (off), 36 % (on)")


def device_events(*spans: tuple[int, int]) -> list[Event]:
    """A device's steps, (start, length) in ms, beside the `server_trace` that launched them."""
    return [
        Event("decode", "X", (7000 + at) * MS, "device", duration=for_ms * MS, role="scheduler") for at, for_ms in spans
    ]


def test_a_devices_own_times_are_drawn_and_what_was_launching_is_the_hosts() -> None:
    """The engine's six spans of 3 ms are launches then, and the device's bubble is 1 of 6 ms."""
    figure = viz.timeline([*server_trace(), *device_events((10, 2), (13, 3))])
    assert figure.get_suptitle() == "The device has nothing to do for 17 % of the time of 2 steps"
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["scheduler", "device"]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["schedule", "launch", "decode", "bubble: the device has nothing to do"]
    on_host = [round(bar.get_width()) for bar in axes.patches if bar.get_y() == -0.4]
    assert on_host == [2, 3] * 3, "each schedule and each launch up to the last step's end"
    with_launch = [*server_trace(), Event("launch", "X", 7010 * MS, "scheduler", duration=MS, role="scheduler")]
    widths = [round(b.get_width()) for b in viz.timeline([*with_launch, *device_events((10, 2))]).axes[0].patches]
    assert 3 not in widths, "an engine's span within a launch is not drawn again"


def test_latencies() -> None:
    first, between = viz.latencies(server_trace(requests=2, steps=3))
    assert first == pytest.approx([0.0075] * 2)
    assert between == pytest.approx([0.005] * 4)
    without_messages = [event for event in server_trace() if event.track != "messages"]
    assert viz.latencies(without_messages)[0] == pytest.approx([0.006] * 3)


def test_pages_of_a_trace() -> None:
    snapshots = viz.page_snapshots(server_trace(requests=3), num_pages=8)
    assert snapshots[2].rows == {0: [0, 1], 1: [0, 3], 2: [4, 5]}
    assert (snapshots[2].num_shared, snapshots[2].num_free) == (1, 3)
    assert snapshots[3].rows == {1: [0, 3], 2: [4, 5]}
    assert snapshots[3].cached == {1}
    assert (snapshots[4].cached, snapshots[4].num_free) == (frozenset(), 4)


def test_a_map_counts_all_pages() -> None:
    """The trace's counter says 50, of which 18 are ever used; in a large pool only those are drawn."""
    figure = viz.page_map(viz.page_snapshots(server_trace(requests=9)))
    assert figure.get_suptitle() == "9 requests in 50 pages: never fewer than 33 free, up to 1 shared"
    assert figure.axes[0].get_ylim() == (49.5, -0.5)
    figure = viz.page_map(viz.page_snapshots(server_trace(requests=9), num_pages=7000))
    assert figure.get_suptitle().startswith("9 requests in 7,000 pages: never fewer than 6,983 free")
    assert (figure.axes[0].get_ylim(), figure.axes[0].get_ylabel()) == ((17.5, -0.5), "page (18 to 6,999 stay free)")


def test_a_moment_is_no_colour_of_its_own() -> None:
    """Between two events of one step a page is in no row and not yet freed: not in a prefix cache for all that."""
    moments = [(0.0, {0: [0]}, ()), (1.0, {}, (0,)), (1.000001, {}, ()), (2.0, {}, ())]
    snapshots = [viz.PageSnapshot(4, rows, frozenset(cached), time) for time, rows, cached in moments]
    (legend,) = viz.page_map(snapshots).figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["request 0", "free"]


def test_a_few_pages_of_a_large_pool_are_seen() -> None:
    events = [Event("pages", "C", MS * i, "counters", args={"free": 9000 - i, "rows": i}) for i in range(5)]
    axes = viz.page_usage(events).axes[0]
    assert (axes.get_ylim(), axes.get_ylabel()) == ((0, 5), "pages, of 9,000")


def test_steps_without_a_number_have_the_phase_of_their_plan() -> None:
    """Stage 5's do. Drawn from the middle on, and of a plan that was made before the window begins."""
    events = server_trace()
    for event in events:
        if event.name == "forward":
            event.args.pop("step")
    for first, expected in ((1, ["schedule", "decode", "prefill"]), (3, ["schedule", "decode"])):
        (legend,) = viz.timeline(events, first=first).figure.legends
        assert [text.get_text() for text in legend.get_texts()][:-1] == expected


def test_a_slide_fills_a_projector(tmp_path: Path) -> None:
    """Also one that a notebook shows lower than usual. (Of every figure: test_layout.py.)"""
    for figure in (viz.batch_composition(server_trace(), size="projector"), FIGURES["memory budget"]("projector")):
        figure.savefig(tmp_path / "slide.png")
        header = (tmp_path / "slide.png").read_bytes()[16:24]
        assert (int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")) == (1920, 1080)


def test_pages_of_a_live_pool() -> None:
    table, allocator, reqs = pool_with_rows()
    snapshot = viz.snapshot_pages(table, allocator, reqs)
    assert snapshot.num_free == allocator.num_free
    assert {uid: len(pages) for uid, pages in snapshot.rows.items()} == {0: 5, 1: 4, 2: 7}
    assert "up to 1 shared" in viz.page_map(page_run()).get_suptitle()


def test_pages_of_a_real_run(tmp_path: Path) -> None:
    """After each token: what is drawn free is what the allocator has, and the common prefix is in all rows."""
    options = {"page_size": 4, "num_pages": 64, "threads": 1, "dtype": "float32"}
    prefix = list(range(16))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(str(make_tiny_model(tmp_path / "model")), **options) as llm:
        llm.generate([[*prefix, 99]], params)
        snapshots = []
        for _ in llm.stream([[*prefix, uid] for uid in range(3)], params):
            snapshots.append(viz.snapshot_scheduler(llm.scheduler))
            assert snapshots[-1].num_free == llm.scheduler.cache.allocator.num_free
    assert max(snapshot.num_shared for snapshot in snapshots) == 4  # pages
    assert snapshots[-1].cached


def test_radix_steps_say_what_happened() -> None:
    findings = [snapshot.finding for snapshot in tree_run()[1:]]
    assert findings == [
        "insert: 20 tokens inserted",
        "insert: 12 tokens known already, 1 node split, 12 tokens inserted",
        "insert: 48 tokens inserted",
        "match: 20 tokens hit",
        "lock: 20 tokens hit, 20 more tokens locked",
        "evict: 12 tokens evicted",
        "match: nothing found, nothing changed",
    ]


def test_radix_steps_tell_who_looked_from_who_inserted() -> None:
    """Both in one action, and afterwards the cache is as it was."""
    cache, ids = RadixCache(4), torch.arange(12, dtype=torch.int32)
    cache.insert_prefix(ids[:8], ids[:8])
    _, snapshot = viz.radix_steps(cache, [("both", lambda c: [c.match_prefix(ids[:4]), c.insert_prefix(ids, ids)])])
    assert snapshot.finding == "both: 4 tokens hit, 8 tokens known already, 1 node split, 4 tokens inserted"
    assert {"match_prefix", "insert_prefix"}.isdisjoint(vars(cache))


def test_radix_snapshot_is_the_tree() -> None:
    snapshot = tree_run()[5]
    by_length = sorted((len(node.tokens), node.ref_count) for node in snapshot.nodes())
    assert by_length == [(8, 1), (12, 0), (12, 1), (48, 0)]
    goes = snapshot.next_to_go()
    assert goes is not None
    assert bytes(goes.tokens) == b"down and cri"
    assert viz.snapshot_tree(RadixCache(4)).next_to_go() is None


def test_probabilities_are_the_samplers() -> None:
    """Against arithmetic written out: temperature, then the fewest tokens that hold top_p."""
    params = SamplingParams(temperature=0.5, top_p=0.8)
    expected = torch.softmax(logits() / 0.5, 0)  # descending as the logits are
    keep = int((expected.cumsum(0) < 0.8).sum()) + 1
    expected[keep:] = 0
    torch.testing.assert_close(probabilities(logits(), params), expected / expected.sum())
    greedy = probabilities(logits(), SamplingParams(temperature=0))
    assert greedy.tolist() == [1.0] + [0.0] * 399
    title = viz.logits_to_token(logits(), params, token_name).get_suptitle()
    assert title.startswith(f"{keep} of 400 tokens may be drawn, “␣Paris”")


def test_budget_is_the_engines() -> None:
    """The walk-through's 5.2."""
    parts, pages = viz.budget_parts(0.9, 78 * GIB, 16 * GIB, 128 << 10)
    assert 443_900 < pages < 444_100
    assert sum(parts.values()) == 78 * GIB
    assert parts["KV pages"] == pages * (128 << 10)
    figure = viz.memory_budget(parts, pages=("KV pages", pages))
    assert f"54.2 GiB of 78 GiB are left for {pages:,} pages" == figure.get_suptitle()


def test_titles_state_the_finding() -> None:
    waste = viz.memory_waste({0: 100, 1: 60}, 512, 16).get_suptitle()
    assert waste == "Of contiguous slots 84 % stay empty, of pages of 16 only 9 %"
    growth = viz.cache_bytes({"smollm2": 46080}, 8192).get_suptitle()
    assert growth == "smollm2 keeps 45 KiB for each token: 8,192 tokens take 360 MiB"
    assert viz.gantt(server_trace()).get_suptitle() == "3 requests, at most 3 at a time: request 0 waits 1 ms"
    bounds = viz.roofline(POINTS, H200).get_suptitle().replace("\n", " ")
    assert bounds.startswith(
        "Memory bounds decode, 1 request (0.964) and decode, 64 requests (40.5); arithmetic bounds"
    )
    assert viz.shards(MODEL, 2).get_suptitle() == "9 q heads on 2 ranks are 6 + 3, and 3 KV heads 2 + 1"
    assert "2 ranks hold each of the 4 KV heads" in viz.shards(WIDE, 8).get_suptitle().replace("\n", " ")


def test_a_layer_waits_for_its_fullest_rank() -> None:
    """Rank 0 has 6 of 9 heads: 2/3 of the attention's products and half of the MLP's, 54 % of all."""
    figure = viz.layer_on_ranks(MODEL, 2)
    title = figure.get_suptitle().replace("\n", " ")
    assert (
        title
        == "A layer takes 54 % of its products' time on 2 ranks, and 2 all-reduces: the fullest rank sets the pace"
    )
    (legend,) = figure.legends
    assert legend.get_texts()[-2].get_text() == "all-reduce: 576 values a token"
    assert "K and V are computed 2 times" in viz.layer_on_ranks(WIDE, 8).get_suptitle().replace("\n", " ")
    title = viz.layer_on_ranks(MODEL, 3).get_suptitle().replace("\n", " ")
    assert title == "A layer takes 33 % of its products' time on 3 ranks, and 2 all-reduces"
    assert "100 %" in viz.layer_on_ranks(MODEL, 1).get_suptitle()
    taxes = viz.launch_tax({"eager": (0.2, 0.8)}).get_suptitle()
    assert taxes == "Share of a step in which the device waits for launches: 75 % (eager)"
    assert viz.gantt(server_trace(), title="mine").get_suptitle() == "mine"


def test_what_the_device_waits_for() -> None:
    """Ten kernels of 2 µs. One by one, 6 µs apart, 20 of 61 µs; by a graph they follow one another from 20 µs on."""
    eager, graph = (viz.launched_step(launched(10, graph)) for graph in (False, True))
    assert (eager.busy, eager.lasts) == (pytest.approx(20e-6), pytest.approx(61e-6))
    assert (graph.busy, graph.lasts) == (pytest.approx(20e-6), pytest.approx(40e-6))
    assert len(graph.runs()) == 1
    figure = viz.launches({"eager": launched(10, False), "graph": launched(10, True)})
    title = figure.get_suptitle().replace("\n", " ")
    assert title == "The device waits for launches: 20 µs of work take 61 µs (eager), 20 µs of work take 40 µs (graph)"
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "eager: 10 launches, 10 kernels",
        "graph: 2 launches, 10 kernels",
    ]
    assert figure.axes[0].get_xlim() == pytest.approx((0, 1.03 * 40)), "the shorter step is there whole"


def test_kernels_of_two_streams_are_not_counted_twice() -> None:
    other = [
        Event("copy", "X", 7_000_006_000 + 1000 * n, "stream 9", args={"launch": 0}, duration=2000) for n in (0, 1)
    ]
    step = viz.launched_step([*launched(10, False), *other])
    assert step.runs()[0] == (7_000_005_000, 7_000_009_000)
    assert step.busy == pytest.approx(22e-6)


def test_where_the_time_of_a_rank_goes() -> None:
    """Eight meetings after the first: the last to come takes 5 µs for each, rank 0 comes 2 µs before rank 1."""
    parts = viz.step_parts(layers_of_ranks())
    assert [round(1e6 * seconds) for seconds in parts.values()] == [8 * 6 + 4, 8 * 5, 8, 8 * 3]
    alone = viz.step_parts(layers_of_ranks(ranks=1))
    assert [round(1e6 * seconds) for seconds in alone.values()] == [8 * 6 + 4, 0, 0, 8 * 2]
    title = viz.recorded_layers(layers_of_ranks()).get_suptitle().replace("\n", " ")
    assert title.startswith("A layer on 2 ranks: 12 µs of work, 10 µs of communication, 2 µs of waiting")


def test_a_meeting_that_was_launched_early_begins_when_the_work_before_it_ends() -> None:
    """Programmatic dependent launch: it lies on the device, and waits there."""
    early = [
        replace(event, ts=event.ts - 3000, duration=(event.duration or 0) + 3000) if event.name != "compute" else event
        for event in layers_of_ranks()
    ]
    assert viz.step_parts(early) == pytest.approx(viz.step_parts(layers_of_ranks()))


def test_the_layers_asked_for_are_drawn() -> None:
    (axes,) = viz.recorded_layers(layers_of_ranks(), first=1, count=2).axes
    assert axes.get_xlabel() == "time (µs), layers 1 to 2"
    assert axes.get_xlim()[1] == pytest.approx(1.01 * 60), "two layers of two parts of 15 µs"
    widths = sorted(round(bar.get_width()) for bar in axes.patches)
    assert widths == [0] * 4 + [2] * 4 + [5] * 8 + [8] * 4 + [10] * 4


def test_a_stall_is_a_flat_line() -> None:
    figure = viz.token_times({"off": [5.0, 5.1, 5.9], "on": [5.0, 5.2, 5.4]})
    assert figure.get_suptitle() == "The longest wait for a token: 800 ms (off), 200 ms (on)"
    line = figure.axes[0].get_lines()[0]
    assert np.allclose(np.array(line.get_xdata()), [0, 100, 900])
    assert list(line.get_ydata()) == [1, 2, 3]
    with pytest.raises(ValueError, match="at least two tokens"):
        viz.token_times({"off": [5.0]})


def test_what_cannot_be_drawn_is_said() -> None:
    empty = [Event("x", "i", MS, "nowhere")]
    for draw, message in (
        (viz.gantt, "tells of no request"),
        (viz.batch_composition, "no step"),
        (viz.timeline, "no step"),
        (viz.page_usage, 'no counter "pages"'),
        (viz.page_snapshots, "row_pages"),
        (viz.journey, "no messages"),
        (viz.recorded_layers, "record-trace layers"),
        (viz.launched_step, "record-trace launches"),
    ):
        with pytest.raises(ValueError, match=message):
            draw(empty)
    with pytest.raises(ValueError, match="step must be from 1 to 6, not 7"):
        viz.batch_composition(server_trace(), step=7)
    with pytest.raises(ValueError, match="has no request 9"):
        viz.journey(server_trace(), 9)
    with pytest.raises(ValueError, match="at most 40 can be drawn"):
        viz.page_table(pool_with_rows(99)[0], pool_with_rows(99)[2], 99)
    with pytest.raises(ValueError, match="layers 3 to 4 are not among the 4"):
        viz.recorded_layers(layers_of_ranks(), first=3)
    with pytest.raises(ValueError, match="not possible"):
        viz.launch_tax({"eager": (2.0, 1.0)})


def test_goodput_is_drawn_beside_all_that_come() -> None:
    figure = viz.goodput({"mixed": {10: 10.0, 40: 31.0, 60: 12.0}})
    assert figure.get_suptitle() == "At best in time: 31 a second (mixed)"
    drawn = {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in figure.axes[0].get_lines()}
    assert drawn == {"mixed": [[10, 10], [40, 31], [60, 12]], "all that come": [[0, 0], [60, 60]]}
    (pages,) = viz.goodput({"": {100: 1.0, 200: 2.0}}, offered=3, quantity="pages").axes
    assert np.asarray(pages.get_lines()[-1].get_xydata()).tolist() == [[0, 3], [200, 3]]
    with pytest.raises(ValueError, match="two points"):
        viz.goodput({"mixed": {10: 10.0}})
