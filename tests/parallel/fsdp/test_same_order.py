"""Ranks that come to units in different orders are told so, in any iteration."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlaunch.parallel.fsdp import fully_shard

from ..worlds import RankFailed, WorldOf


class AnyOrder(nn.Module):
    """Three layers, run in the order that a forward is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})

    def forward(self, hidden: Tensor, order: str) -> Tensor:
        for name in order:
            hidden = self.layers[name](hidden)
        return hidden


def run_orders(
    rank: int, orders: Sequence[Sequence[str]], transport: str, timeout_s: float, sharded: bool = True
) -> None:
    """In each iteration rank ``r`` runs ``orders[iteration][r]``."""
    torch.manual_seed(0)
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=timeout_s))
    model = AnyOrder()
    for module in (*model.layers.values(), model):
        fully_shard(module, transport=transport, process_group=group if sharded else (None, group))
    for order in orders:
        torch.autograd.backward(model(torch.ones(1, 4), order[rank]).sum())


@pytest.mark.parametrize("transport", ["torch", "shared_memory"])
def test_all_ranks_may_take_another_path_together(world_of: WorldOf, transport: str) -> None:
    paths = ["abc", "abc", "acb", "ab", "abc", "abcabc", "a"]
    world_of(2).run(run_orders, [(path, path) for path in paths], transport, 60)


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ([("abc", "bac")], "rank 0 runs layers.a, rank 1 runs layers.b"),
        ([("abc", "abc"), ("abc", "abc"), ("acb", "aab")], "rank 0 runs layers.c, rank 1 runs layers.a"),
        ([("abc", "abc"), ("abca", "abcb")], "rank 0 runs layers.a, rank 1 runs layers.b"),
    ],
)
def test_ranks_that_part_are_told_what_each_runs(world_of: WorldOf, orders: Sequence[Sequence[str]], said: str) -> None:
    with pytest.raises(RankFailed, match=said):
        world_of(2).run(run_orders, orders, "torch", 60)


def test_ranks_that_hold_the_same_rows_are_compared_too(world_of: WorldOf) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 runs layers\.a, rank 1 runs layers\.b"):
        world_of(2).run(run_orders, [("abc", "bac")], "torch", 60, False)


@pytest.mark.parametrize(
    ("transport", "the_other"),
    [("torch", r"the gather of unit layers\.c failed"), ("shared_memory", "rank 1 (gave up|did not come)")],
)
def test_a_rank_that_strays_alone_says_so_when_the_time_is_up(
    world_of: WorldOf, transport: str, the_other: str
) -> None:
    orders = [("abc", "abc"), ("abc", "acb")]
    with pytest.raises(RankFailed, match=r"Rank 1 runs the unit layers\.c where it ran another one") as raised:
        world_of(2).run(run_orders, orders, transport, 4)
    assert re.search(the_other, str(raised.value))
