"""Gradient scalers and norms: torch's own know that each rank has a part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from dlaunch.parallel.fsdp import fully_shard
from dlaunch.parallel.fsdp.before_step import teach_norms

from ..worlds import WorldOf
from .fsdp_models import net, shard_blocks


def overflows(rank: int, sharded_scaler: bool) -> None:
    model = fully_shard(nn.Linear(2, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make: Any = ShardedGradScaler if sharded_scaler else torch.amp.GradScaler
    scaler = make("cpu", init_scale=8.0)
    before = model.weight.detach().clone()
    for row, steps in ((3, False), (0, False), (None, True)):  # of four rows this rank has two
        optimizer.zero_grad()
        output = model(torch.ones(1, 2))
        factor = torch.ones(1, 4)
        if row is not None:
            factor[0, row] = 3e38
        torch.autograd.backward(scaler.scale((output * factor).sum()))
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) is not steps
        assert scaler.get_scale() == (scale if steps else scale / 2)
    assert torch.allclose(model.weight, before - 0.1)


@pytest.mark.parametrize("sharded_scaler", [False, True])
def test_a_step_that_overflows_on_one_rank_is_left_out_by_all(world_of: WorldOf, sharded_scaler: bool) -> None:
    world_of(2).run(overflows, sharded_scaler)


def old_torch(rank: int) -> None:
    """Before 2.6 ``clip_grad_norm_`` asks no function for the norm."""
    original: Any = torch.nn.utils.clip_grad_norm_
    home, package = SimpleNamespace(clip_grad_norm_=original), SimpleNamespace(clip_grad_norm_=original)
    teach_norms(home, package)
    assert home.clip_grad_norm_ is package.clip_grad_norm_ is not original
    plain, model = net(), shard_blocks(net())
    for module in (plain, model):
        torch.autograd.backward(module(torch.arange(11)).square().sum())
    expected = original(plain.parameters(), 3.0)
    torch.testing.assert_close(home.clip_grad_norm_(model.parameters(), 3.0), expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        whole = theirs.grad.reshape(theirs.shape or (1,))
        rows = -(-whole.shape[0] // 2)
        torch.testing.assert_close(ours.grad, whole[rank * rows : (rank + 1) * rows])
    assert home.clip_grad_norm_(plain.parameters(), 1.0) == pytest.approx(3.0, rel=1e-4)  # what is whole, as ever


def test_norms_are_over_all_ranks_with_a_torch_that_computes_them_in_place(world_of: WorldOf) -> None:
    world_of(2).run(old_torch)
