"""What a sharded module can do besides, in the style of torch's FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlaunch.errors import UsageError
from dlaunch.parallel.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from dlaunch.parallel.fsdp.fully_shard import unit_of
from dlaunch.parallel.fsdp.refusals import OF_MODULES
from dlaunch.parallel.fsdp.sharded_parameter import shard_of
from dlaunch.parallel.fsdp.unit import State

from ..worlds import WorldOf
from .fsdp_models import Net, net, shard_blocks, train, train_alone


def handles(rank: int) -> None:
    model: Any = shard_blocks(net(), transport="torch")
    handle = model.blocks[0].unshard(async_op=True)
    assert unit_of(model.blocks[0]).state is State.GATHERING
    handle.wait()
    assert model.blocks[0].up.weight.shape == (7, 6)
    model.blocks[0].reshard()
    assert model.unshard() is None
    model.reshard()
    tokens = torch.arange(8)
    model.set_reshard_after_forward(False)
    output = model(tokens)
    assert unit_of(model.blocks[0]).state is State.WHOLE
    torch.autograd.backward(output.sum())
    model.set_reshard_after_forward(True, recurse=False)
    model.blocks[0].set_reshard_after_forward(True)
    model(tokens)
    assert [unit_of(part).state for part in (model, *model.blocks)] == [
        State.SHARDED,
        State.SHARDED,
        State.WHOLE,
        State.WHOLE,
    ]


def test_units_are_gathered_and_kept_as_they_are_told(world_of: WorldOf) -> None:
    world_of(2).run(handles)


def divides(rank: int) -> None:
    model: Any = fully_shard(nn.Linear(2, 4, bias=False))
    model.set_gradient_divide_factor(1.0)
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    assert torch.equal(model.weight.grad, torch.full((2, 2), 2.0))


def test_gradients_are_divided_by_the_factor_that_was_set(world_of: WorldOf) -> None:
    world_of(2).run(divides)


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(inputs)
        return result

    def encode(self, inputs: Tensor, *, fail: bool = False) -> Tensor:
        if fail:
            raise ZeroDivisionError
        doubled: Tensor = self(inputs) * 2
        return doubled


def other_forward(rank: int) -> None:
    torch.manual_seed(0)
    plain = TwoWays()
    torch.manual_seed(0)
    model: Any = fully_shard(TwoWays())
    with pytest.raises(ValueError, match="has no method decode"):
        register_fsdp_forward_method(model, "decode")
    register_fsdp_forward_method(plain, "decode")  # not sharded: nothing
    register_fsdp_forward_method(model, "encode")
    with pytest.raises(ZeroDivisionError):
        model.encode(torch.ones(1, 2), fail=True)
    for module in (plain, model):
        torch.autograd.backward(module.encode(torch.ones(1, 2)).sum())
    assert plain.layer.weight.grad is not None
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad[rank : rank + 1])


def test_another_method_can_be_a_forward(world_of: WorldOf) -> None:
    world_of(2).run(other_forward)


def refuses(rank: int) -> None:
    model: Any = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    for name in OF_MODULES:
        with pytest.raises(UsageError, match=rf"FSDPModule\.{name} is not in dlaunch's FSDP\."):
            getattr(model, name)()
    with pytest.raises(UsageError, match="set_requires_all_reduce"):
        model.set_requires_all_reduce(False)
    part = model[:2]
    assert type(part) is nn.Sequential
    assert not isinstance(part, FSDPModule)


def test_what_only_torchs_has_is_refused_by_name_and_a_slice_is_plain(world_of: WorldOf) -> None:
    world_of(2).run(refuses)


def exchanged(rank: int) -> None:
    """Rows that were exchanged by ``assign`` or ``to_empty`` are shards before any forward."""
    with torch.device("meta"):
        model = shard_blocks(Net())
    model.to_empty(device="cpu")
    assert all(shard_of(parameter) is not None for parameter in model.parameters())
    model.load_state_dict(net().state_dict(), assign=True)
    assert all(shard_of(parameter) is not None for parameter in model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    plain = net()
    expected = train_alone(plain, torch.optim.Adam(plain.parameters()), 2, steps=2)
    assert train(model, optimizer, rank, 2, steps=2) == expected[rank]


def test_parameters_that_were_exchanged_are_shards_at_once(world_of: WorldOf) -> None:
    world_of(2).run(exchanged)
