"""The arithmetic of shares, over generated sizes and worlds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlaunch.parallel.data.sample_order import Ending, Share, taker_in_stream

SIZES = st.integers(0, 60)
WORLDS = st.integers(1, 7)
BATCHES = st.integers(1, 6)


def shares(size: int, start: int, world_size: int, ending: Ending) -> list[Share]:
    return [Share(size, start, world_size, rank, ending) for rank in range(world_size)]


@settings(deadline=None)
@given(size=SIZES, data=st.data(), world_size=WORLDS)
def test_ragged_shares_cover_what_is_left_exactly_once(size: int, data: st.DataObject, world_size: int) -> None:
    start = data.draw(st.integers(0, size))
    taken = [position for share in shares(size, start, world_size, Ending.RAGGED) for position in share.positions()]
    assert sorted(taken) == list(range(start, size))


@settings(deadline=None)
@given(size=SIZES, data=st.data(), world_size=WORLDS)
def test_padded_shares_are_equal_and_repeat_fewer_samples_than_there_are_ranks(
    size: int, data: st.DataObject, world_size: int
) -> None:
    start = data.draw(st.integers(0, size))
    padded = [share.positions() for share in shares(size, start, world_size, Ending.PAD)]
    assert len({len(positions) for positions in padded}) == 1
    in_turn = [position for positions in zip(*padded, strict=True) for position in positions]
    left = size - start
    assert in_turn[:left] == list(range(start, size))
    assert len(in_turn) - left < world_size
    assert in_turn[left:] == [extra % size for extra in range(len(in_turn) - left)]


@settings(deadline=None)
@given(size=SIZES, data=st.data(), world_size=WORLDS)
def test_dropping_shares_are_equal_and_leave_out_fewer_samples_than_there_are_ranks(
    size: int, data: st.DataObject, world_size: int
) -> None:
    start = data.draw(st.integers(0, size))
    dropping = [share.positions() for share in shares(size, start, world_size, Ending.DROP)]
    in_turn = [position for positions in zip(*dropping, strict=True) for position in positions]
    assert in_turn == list(range(start, start + len(in_turn)))
    assert size - start - len(in_turn) < world_size


@settings(deadline=None)
@given(size=SIZES, data=st.data(), world_size=WORLDS, batch_size=BATCHES)
def test_a_step_consumes_the_next_block_of_the_order(
    size: int, data: st.DataObject, world_size: int, batch_size: int
) -> None:
    start = data.draw(st.integers(0, size))
    world = shares(size, start, world_size, Ending.RAGGED)
    for step in range(world[0].steps(batch_size)):
        block = [p for share in world for p in share.positions()[step * batch_size : (step + 1) * batch_size]]
        before, after = world[0].consumed(step * batch_size), world[0].consumed((step + 1) * batch_size)
        assert sorted(block) == list(range(before, after))


@settings(deadline=None)
@given(
    size=SIZES,
    data=st.data(),
    world_size=WORLDS,
    batch_size=BATCHES,
    ending=st.sampled_from(Ending),
    drop_last=st.booleans(),
)
def test_every_rank_knows_how_many_steps_the_longest_and_the_shortest_rank_make(
    size: int, data: st.DataObject, world_size: int, batch_size: int, ending: Ending, drop_last: bool
) -> None:
    start = data.draw(st.integers(0, size))
    world = shares(size, start, world_size, ending)
    made = []
    for share in world:
        whole, rest = divmod(len(share.positions()), batch_size)
        made.append(whole + (rest > 0 and not drop_last))
    assert {share.steps(batch_size, drop_last=drop_last) for share in world} == {max(made)}
    assert {share.common_steps(batch_size, drop_last=drop_last) for share in world} == {min(made)}
    assert max(made) - min(made) <= 1
    if ending is not Ending.RAGGED:
        assert max(made) == min(made)


@settings(deadline=None)
@given(length=SIZES, world_size=WORLDS, batch_size=BATCHES, workers=st.integers(1, 4))
def test_a_stream_gives_each_step_the_next_block_whatever_the_number_of_loader_workers(
    length: int, world_size: int, batch_size: int, workers: int
) -> None:
    step_size = world_size * batch_size
    for offset in range(length):
        rank, worker = taker_in_stream(offset, world_size, batch_size, workers)
        assert rank == offset % step_size % world_size
        assert worker == offset // step_size % workers


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="Invalid rank"):
        Share(10, 0, world_size, rank)
