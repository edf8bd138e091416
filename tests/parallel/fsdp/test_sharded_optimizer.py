"""ZeRO stage 1: the same training, a part of the state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from dlaunch.parallel import DistributedDataParallel
from dlaunch.parallel.fsdp import ShardedOptimizer
from dlaunch.parallel.fsdp.sharded_optimizer import owners_of

from ..worlds import WorldOf
from .fsdp_models import batches, net


@pytest.mark.parametrize(
    ("numels", "world_size", "owners"),
    [([4, 3, 2, 1], 2, [0, 1, 1, 0]), ([5], 3, [0]), ([], 2, []), ([1, 1, 9, 1], 2, [1, 1, 0, 1])],
)
def test_parameters_go_to_the_rank_that_has_least(numels: list[int], world_size: int, owners: list[int]) -> None:
    assert owners_of(numels, world_size) == owners


def trains_alike(rank: int) -> int:
    models = [DistributedDataParallel(net()) for _ in range(2)]
    whole = torch.optim.AdamW(models[0].parameters(), lr=0.01)
    part = ShardedOptimizer(models[1].parameters(), torch.optim.AdamW, lr=0.01)
    optimizers: list[Any] = [whole, part]
    for tokens, targets in batches(50, 8):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(tokens[rank::2]), targets[rank::2]))
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    part.load_state_dict(part.state_dict())
    everything = sum(v.nbytes for state in whole.state.values() for v in state.values())
    assert part.state_nbytes() < 0.6 * everything
    return int(everything) - part.state_nbytes()


def test_fifty_steps_under_ddp_give_the_same_bits_with_half_the_state(world_of: WorldOf) -> None:
    absent = world_of(2).run(trains_alike)
    assert all(count > 0 for count in absent)
