"""The cut of a parameter and of a unit's messages, as tables."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlaunch.parallel.fsdp.shard_layout import ALONE_BYTES, Messages, ShardLayout, messages_of


@pytest.mark.parametrize(
    ("shape", "world_size", "rows"),
    [
        ((8, 3), 2, [(0, 4), (4, 8)]),
        ((7, 3), 2, [(0, 4), (4, 7)]),
        ((5,), 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        ((1, 9), 3, [(0, 1), (1, 1), (1, 1)]),
        ((0, 9), 2, [(0, 0), (0, 0)]),
        ((), 2, [(0, 1), (1, 1)]),
        ((6, 0), 3, [(0, 2), (2, 4), (4, 6)]),
    ],
)
def test_rows_are_cut_like_torch_chunk(shape: tuple[int, ...], world_size: int, rows: list[tuple[int, int]]) -> None:
    layout = ShardLayout(shape, world_size)
    assert [layout.rows(rank) for rank in range(world_size)] == rows


@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 9))
def test_pieces_cover_the_whole_once_and_in_order(shape: list[int], world_size: int) -> None:
    layout = ShardLayout(tuple(shape), world_size)
    spans = [layout.span(rank) for rank in range(world_size)]
    assert spans[0][0] == 0
    assert spans[-1][1] == layout.numel
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for rank in range(world_size):
        rows = layout.shard_shape(rank)[0]
        assert rows <= layout.rows_per_rank
        assert layout.shard_shape(rank)[1:] == tuple(shape[1:])


def test_large_tensors_travel_alone_and_small_ones_by_data_type() -> None:
    large = ShardLayout((2 * ALONE_BYTES, 1), 2)
    small = ShardLayout((4,), 2)
    kinds = messages_of([small, large, small, small], [("f", 4), ("f", 4), ("b", 2), ("f", 4)])
    assert kinds == Messages(alone=(1,), packed=((0, 3), (2,)))
