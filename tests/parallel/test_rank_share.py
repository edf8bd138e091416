"""Shares of a script's own samplers and streams: even, complete, drawn alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, WeightedRandomSampler

from dlaunch.parallel.scripts.rank_share import RankShare, RankStream, even_share, same_draws


@given(size=st.integers(0, 60), world_size=st.integers(1, 9), drop_last=st.booleans())
def test_shares_are_even_and_together_the_whole_with_some_repeated_or_left_out(
    size: int, world_size: int, drop_last: bool
) -> None:
    shares = [even_share(range(size), rank, world_size, drop_last) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    together = [shares[index % world_size][index // world_size] for index in range(world_size * len(shares[0]))]
    assert together[:size] == list(range(size))[: len(together)]
    assert len(together) - size in (range(1 - world_size, 1) if drop_last else range(world_size))
    assert together[size:] == [index % size for index in range(len(together) - size)]


class Shuffled:
    """Draws from all three global generators."""

    def __iter__(self) -> Iterator[float]:
        return iter([torch.rand(()).item(), random.random(), float(np.random.rand()), 4.0])

    def __len__(self) -> int:
        return 4


def test_ranks_whose_generators_differ_draw_the_same_order_and_keep_their_own_states() -> None:
    drawn, after = [], []
    for rank in range(2):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        drawn.append(list(RankShare(Shuffled(), rank, 2, 7, False)))
        after.append((torch.rand(()).item(), random.random(), np.random.rand()))
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        assert after[-1] == (torch.rand(()).item(), random.random(), np.random.rand())
    with same_draws(7):
        whole = list(Shuffled())
    assert drawn == [whole[0::2], whole[1::2]] and after[0] != after[1]


def test_each_epoch_draws_another_order() -> None:
    share = RankShare(WeightedRandomSampler([1.0] * 50, 20), 0, 2, 0, False)
    first = list(share)
    assert list(share) == first and len(share) == len(first) == 10
    share.set_epoch(1)
    assert list(share) != first


@pytest.mark.parametrize(("drop_last", "length"), [(True, 3), (False, 4)])
def test_the_length_is_what_comes(drop_last: bool, length: int) -> None:
    share = RankShare(range(10), 2, 3, 0, drop_last)
    assert len(share) == len(list(share)) == length


class Count(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


class Sized(Count):
    def __len__(self) -> int:
        return 11


def test_a_stream_is_shared_out_in_groups_and_an_incomplete_one_is_left_out() -> None:
    shares: list[Any] = [list(RankStream(Count(), rank, 3)) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert len(RankStream(Sized(), 0, 3)) == 3
    with pytest.raises(TypeError):
        len(RankStream(Count(), 0, 3))
