"""Memory that is measured: the bytes of live storages, by what they are for."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlaunch.parallel.fsdp import fully_shard
from dlaunch.parallel.fsdp.fully_shard import unit_of

from ..worlds import WorldOf

WIDTH, LAYERS = 128, 6


def model_of(units: bool, transport: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model if units else []:
        fully_shard(layer, transport=transport)
    return fully_shard(model, transport=transport)


def storage_bytes(tensors: Any) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def at_rest(rank: int, size: int) -> tuple[int, int, int]:
    model = model_of(units=True, transport="torch")
    optimizer = torch.optim.Adam(model.parameters())
    torch.autograd.backward(model(torch.ones(2, WIDTH)).sum())
    optimizer.step()
    gc.collect()
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    wholes = [whole for layer in model for whole in unit_of(layer).memory.wholes]  # type: ignore[union-attr]
    assert storage_bytes(wholes) == 0
    return (
        storage_bytes(model.parameters()),
        storage_bytes(p.grad for p in model.parameters()),
        storage_bytes(states),
    )


@pytest.mark.parametrize("size", [2, 4])
def test_parameters_gradients_and_optimizer_state_are_one_nth_on_each_rank(world_of: WorldOf, size: int) -> None:
    whole = 4 * WIDTH * WIDTH * LAYERS
    for parameters, gradients, state in world_of(size).run(at_rest, size):
        assert (parameters, state) == (whole / size, 2 * whole / size)
        assert 0 <= gradients - whole / size <= 4 * LAYERS  # one flag for each unit travels with them


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of whole parameters that lived at once, looked at after every operation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = unit_of(model).run.units
        self.highest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        wholes = [whole for unit in self._units if unit.memory is not None for whole in unit.memory.wholes]
        self.highest = max(self.highest, storage_bytes(wholes))
        return result


def peak(rank: int, units: bool) -> int:
    model = model_of(units, "torch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    highest = 0
    for _ in range(3):
        with Watch(model) as watch:
            torch.autograd.backward(model(torch.ones(2, WIDTH)).sum())
        optimizer.step()
        highest = max(highest, watch.highest)
    return highest


def test_beside_shards_a_step_needs_the_two_largest_units_and_one_unit_saves_nothing(world_of: WorldOf) -> None:
    layer = 4 * WIDTH * WIDTH
    assert world_of(2).run(peak, True) == [2 * layer] * 2
    assert world_of(2).run(peak, False) == [LAYERS * layer] * 2
