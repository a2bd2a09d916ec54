"""A step as recorded graphs read it: what is in the buffers, and that nothing of an earlier step is left."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.attention.paged_rows import PagedRows, paged_rows
from minisgl.attention.step_rows import RecordedSteps, StepRows, step_rows, tiles_of
from minisgl.core.req import Req
from minisgl.core.sampling_params import SamplingParams

PAGE, TILE = 4, 8
TABLE = torch.cat((torch.arange(8 * 64, dtype=torch.int32).view(8, 64), torch.full((1, 64), 90 * PAGE)))


def req(row: int, tokens: int, cached: int = 0) -> Req:
    return Req(row, torch.zeros(cached + tokens, dtype=torch.int32), SamplingParams(max_tokens=1), row, cached)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40)), min_size=1, max_size=6))
def test_tiles_are_all_queries_once_and_long_ones_come_first(rows: list[tuple[int, int]]) -> None:
    reqs = [req(row, tokens, cached) for row, (tokens, cached) in enumerate(rows)]
    tiles = tiles_of(reqs, TILE).tolist()
    assert sorted(map(tuple, tiles)) == [(row, first) for row, (n, _) in enumerate(rows) for first in range(0, n, TILE)]
    starts = [rows[row][1] + first for row, first in tiles]
    assert starts == sorted(starts, reverse=True)


def filled(recorded: RecordedSteps, decode: list[Req], prompts: list[Req]) -> tuple[PagedRows | None, StepRows]:
    rows = paged_rows(decode, TABLE, PAGE) if decode else None
    step = step_rows(prompts, TABLE, PAGE, TILE)
    recorded.fill(rows, step)
    return rows, step


def test_a_step_is_found_in_the_buffers_and_what_it_lacks_is_empty() -> None:
    recorded = RecordedSteps(4, 3, 64, TABLE, PAGE, TILE)
    seen = recorded.of(64)
    assert seen.decode is not None
    filled(
        recorded, [req(0, 1, 9), req(1, 1, 20), req(2, 1, 30), req(3, 1, 2)], [req(4, 20, 8), req(5, 30), req(6, 10)]
    )
    rows, step = filled(recorded, [req(7, 1, 5), req(2, 1, 17)], [req(1, 13, 4)])
    assert rows is not None
    torch.testing.assert_close(seen.decode.pages[:2, : rows.pages.shape[1]], rows.pages)
    assert seen.decode.lengths.tolist() == [6, 18, 0, 0]
    assert seen.decode.order.tolist() == [1, 0, 2, 3]
    torch.testing.assert_close(seen.prompts.pages[:1, : step.prompts.pages.shape[1]], step.prompts.pages)
    assert int(seen.prompts.lengths[0]) == 17
    assert seen.prompts.starts.tolist() == [2, 15, 15, 15], "after the decode rows' tokens; the others have none"
    assert seen.tiles[:2].tolist() == [[0, 8], [0, 0]]
    assert (seen.tiles[2:, 1] > 64).all(), "no row has such a query"


def test_a_step_of_prompts_alone_leaves_no_decode_row() -> None:
    recorded = RecordedSteps(4, 3, 64, TABLE, PAGE, TILE)
    filled(recorded, [req(0, 1, 9), req(1, 1, 20)], [req(4, 20, 8)])
    filled(recorded, [], [req(4, 20, 8)])
    decode = recorded.of(64).decode
    assert decode is not None
    assert decode.lengths.tolist() == [0] * 4
    assert decode.order.tolist() == [0, 1, 2, 3]
    assert recorded.of(64).prompts.starts.tolist() == [0, 20, 20, 20]


def test_a_small_graph_has_no_more_rows_than_tokens_and_tiles_for_the_worst_case() -> None:
    recorded = RecordedSteps(40, 3, 64, TABLE, PAGE, TILE)
    small = recorded.of(16)
    assert small.decode is not None
    assert len(small.decode.lengths) == 16
    assert len(small.tiles) == 16 // TILE + 3
    assert len(tiles_of([req(0, 9), req(1, 6), req(2, 1)], TILE)) <= len(small.tiles)
