"""Models that differ between ranks are named before training."""

from __future__ import annotations

import pytest
from torch import nn

from dlaunch.parallel import DistributedDataParallel
from dlaunch.parallel.ddp.same_model import Description, first_difference

from .worlds import RankFailed, WorldOf

A: Description = [("a", [2, 3], "float32"), ("b", [4], "float32")]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            [A, A, [("a", [2, 3], "float32"), ("b", [5], "float32")]],
            "'b', float32[4] on rank 0 and 'b', float32[5] on rank 2 ",
        ),
        ([A, [("a", [2, 3], "float64"), A[1]]], "'a', float32[2, 3] on rank 0 and 'a', float64[2, 3] on rank 1 "),
        ([A, A[:1], A[:1]], "'b', float32[4] on rank 0 and no such parameter on ranks 1, 2 "),
        ([A[:1], A], "rank 0 has 1 params, rank 1 has 2 params; the first that rank 0 lacks is 'b'"),
    ],
)
def test_the_sentence_does_not_name_the_parameter_and_the_ranks(ranks: list[Description], said: str) -> None:
    sentence = first_difference(ranks)
    assert sentence.startswith("DDP expects same model across all ranks")
    assert said in sentence


def build_differently(rank: int) -> None:
    DistributedDataParallel(nn.Linear(3, 4 if rank == 1 else 5))


def test_a_model_that_differs_on_one_rank_is_refused_by_name(world_of: WorldOf) -> None:
    with pytest.raises(
        RankFailed, match=r"'weight', float32\[5, 3\] on rank 0 and 'weight', float32\[4, 3\] on rank 1"
    ):
        world_of(3).run(build_differently)
