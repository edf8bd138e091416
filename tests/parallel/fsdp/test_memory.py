"""Memory that is measured: the bytes of live storages, by what they are for."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlaunch.parallel.fsdp import full_state_dict, fully_shard, materialize, stream_full_state
from dlaunch.parallel.fsdp.fully_shard import unit_of

from ..worlds import WorldOf
from .storages import Storages, storage_bytes

WIDTH, LAYERS = 128, 6
LAYER = 4 * WIDTH * WIDTH  # bytes of a unit


def model_of(units: bool, transport: str, layers: int = LAYERS, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for layer in model if units else []:
        fully_shard(layer, transport=transport)
    return fully_shard(model, transport=transport)


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
    whole = LAYER * LAYERS
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


def test_two_units_are_whole_at_once_and_with_one_unit_the_whole_model(world_of: WorldOf) -> None:
    assert world_of(2).run(peak, True) == [2 * LAYER] * 2
    assert world_of(2).run(peak, False) == [LAYERS * LAYER] * 2


def beside_shards(rank: int, units: bool, transport: str, layers: int) -> float:
    """The peak of a step, of all tensors, above parameters, gradients and optimizer state at rest; in units."""
    storages = Storages()
    with storages:
        model = model_of(units, transport, layers)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            storages.highest = 0
            torch.autograd.backward(model(torch.ones(2, WIDTH)).sum())
            highest = storages.highest
            optimizer.step()
        return (highest - storages.now()) / LAYER


@pytest.mark.parametrize("size", [2, 4])
def test_a_steps_peak_beside_shards_does_not_grow_with_the_model_unless_it_is_one_unit(
    world_of: WorldOf, size: int
) -> None:
    six, twelve = (world_of(size).run(beside_shards, True, "torch", layers) for layers in (LAYERS, 2 * LAYERS))
    assert twelve == pytest.approx(six, abs=1.1)  # gloo lets go of what it has sent a moment late
    assert max(six) < 7  # two units of parameters; gradients of two on their way, with what other ranks send of them
    six, twelve = (world_of(size).run(beside_shards, False, "torch", layers) for layers in (LAYERS, 2 * LAYERS))
    assert min(six) > 2 * LAYERS  # all parameters and all gradients are whole at once
    assert min(twelve) - max(six) > 0.9 * LAYERS


def streamed(rank: int, size: int) -> tuple[float, int]:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH + 1, bias=False), layers[0])  # uneven, and tied
    fully_shard(model, transport="torch")
    shards = storage_bytes(model.parameters())
    seen = 0
    with Storages(model.parameters()) as storages:
        for _, value in stream_full_state(model):
            seen += value is not None
            del value
    return (storages.highest - shards) / LAYER, seen


@pytest.mark.parametrize("size", [2, 3])
def test_a_streamed_state_dict_is_never_whole_on_rank_0(world_of: WorldOf, size: int) -> None:
    (first, seen), *others = world_of(size).run(streamed, size)
    assert seen == LAYERS + 2
    assert first < 5.1  # one, a copy where rows do not go round, the tied one; the last two until gloo lets go of them
    assert [number for _, number in others] == [0] * len(others)
    assert max(highest for highest, _ in others) < 0.75  # rows once more, and the last ones until gloo lets go of them


def deferred(rank: int, size: int) -> float:
    storages = Storages()
    with storages:
        model = model_of(True, "torch", device="meta")
        torch.manual_seed(0)
        materialize(model)
    state = full_state_dict(model, rank0_only=False)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    return storages.highest / LAYER - LAYERS / size


@pytest.mark.parametrize("size", [2, 3])
def test_a_model_from_the_meta_device_is_never_whole_on_a_rank(world_of: WorldOf, size: int) -> None:
    assert max(world_of(size).run(deferred, size)) < 2.1  # beside rows a module, or a unit, and its rows once more
