"""``reshard_after_forward`` as a number: a smaller world keeps parameters between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlaunch.parallel.fsdp import fully_shard
from dlaunch.parallel.fsdp.fully_shard import unit_of
from dlaunch.parallel.fsdp.near_ranks import resharding_of
from dlaunch.parallel.fsdp.unit import State
from dlaunch.parallel.fsdp.unit_memory import GatheredMemory

from ..worlds import WorldOf
from .fsdp_models import net, shard_blocks


@pytest.mark.parametrize(
    ("wish", "world_size", "meaning"),
    [
        (None, 4, (None, None)),
        (True, 4, (True, None)),
        (False, 1, (False, None)),
        (2, 4, (True, 2)),
        (1, 4, (False, None)),
        (4, 4, (True, None)),
    ],
)
def test_a_number_is_that_of_ranks_between_none_and_all(wish: Any, world_size: int, meaning: Any) -> None:
    assert resharding_of(wish, world_size) == meaning


@pytest.mark.parametrize("wish", [0, 3, 8, -2])
def test_a_number_that_does_not_divide_the_world_is_refused(wish: int) -> None:
    with pytest.raises(ValueError, match="divides the 4 ranks"):
        resharding_of(wish, 4)


def keeps_a_part(rank: int) -> None:
    model = net()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=2, transport="torch")
    fully_shard(model, transport="torch")
    first = unit_of(model.blocks[0])
    memory = first.memory
    assert isinstance(memory, GatheredMemory)
    output = model(torch.arange(8))
    assert first.state is State.SHARDED
    assert memory.wholes[0].untyped_storage().nbytes() == 0
    weight = model.blocks[0].up.weight
    assert weight.shape[0] == (2, 2, 2, 1)[rank]  # of seven rows a quarter stays the shard
    kept = memory.kept
    assert kept is not None
    assert kept[1].shape[0] == (4, 3)[rank % 2]  # and a half is kept
    torch.autograd.backward(output.sum())
    assert memory.kept is None
    assert weight.grad is not None


def test_between_forward_and_backward_a_half_of_four_ranks_keeps_it_among_them(world_of: WorldOf) -> None:
    world_of(4).run(keeps_a_part)


def is_not_stale(rank: int) -> None:
    model, plain = shard_blocks(net(), reshard_after_forward=2, transport="torch"), net()
    tokens = torch.arange(8)
    for factor in (1.0, 2.0, 3.0):
        changed = {name: value * factor for name, value in net().state_dict().items()}
        model.load_state_dict(changed)
        plain.load_state_dict(changed)
        assert torch.equal(model(tokens), plain(tokens))  # with a graph, and no backward: the next forward gathers anew


def test_what_is_kept_is_never_taken_for_newer_parameters(world_of: WorldOf) -> None:
    world_of(4).run(is_not_stale)
