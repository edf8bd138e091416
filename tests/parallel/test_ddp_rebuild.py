"""Worlds that shrink and grow under a wrapper: the same training as one process that never changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from dlaunch.parallel import DistributedDataParallel
from dlaunch.parallel.ddp.optimizer_state import broadcast_optimizer_state

from .ddp_models import batches
from .worlds import RankFailed, WorldOf

STEPS = 8


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def optimizer_of(kind: str, model: nn.Module) -> Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    match kind:
        case "sgd":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        case "adam":
            return torch.optim.Adam(groups, lr=0.01, eps=1e-3, amsgrad=True, betas=(0.8, 0.9))
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=0.05)
    raise ValueError(kind)


def step(model: nn.Module, optimizer: Optimizer, number: int, rank: int, size: int) -> None:
    inputs, targets = batches(STEPS, 12)[number]
    optimizer.zero_grad()
    torch.autograd.backward(functional.mse_loss(model(inputs[rank::size]), targets[rank::size]))
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= 0.9  # as a scheduler does


def alone(kind: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = network()
    optimizer = optimizer_of(kind, model)
    for number in range(STEPS):
        step(model, optimizer, number, 0, 1)
    return [parameter.detach() for parameter in model.parameters()]


def live_through_changes(rank: int, kind: str, transport: str) -> list[Tensor] | None:
    """Ranks 0 and 1, then 2 joins, then 0 leaves, then 1 leaves and 0 comes back as a new process would."""
    groups = {members: dist.new_group(members) for members in [(0, 1), (0, 1, 2), (1, 2), (2,), (0, 2)]}
    torch.manual_seed(rank)
    model = DistributedDataParallel(network(), process_group=groups[0, 1], transport=transport) if rank < 2 else None
    optimizer = optimizer_of(kind, model) if model is not None else None
    number = 0
    previous: tuple[int, ...] = (0, 1)
    for members in [(0, 1), (0, 1, 2), (1, 2), (0, 2)]:
        if rank not in members:
            model, optimizer, number, previous = None, None, number + 2, members
            continue
        if model is None or optimizer is None:
            torch.manual_seed(100 + rank)
            model = DistributedDataParallel(
                network(), process_group=groups[members], init_sync=False, transport=transport
            )
            optimizer = optimizer_of(kind, model)
            source = model.rebuild(groups[members], optimizer=optimizer, joining=True)
        elif members != previous:
            source = model.rebuild(groups[members], optimizer=optimizer)
        else:
            source = 0
        assert members[source] in previous
        for _ in range(2):
            step(model, optimizer, number, members.index(rank), len(members))
            number += 1
        previous = members
    return None if model is None else [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "transport"),
    [("sgd", "shared_memory"), ("adam", "shared_memory"), ("adam", "torch"), ("adagrad", "torch")],
)
def test_a_world_that_grows_and_shrinks_trains_as_one_process_that_never_changed(
    world_of: WorldOf, kind: str, transport: str
) -> None:
    first, gone, third = world_of(3).run(live_through_changes, kind, transport)
    assert gone is None
    for mine, other, expected in zip(first, third, alone(kind), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def send_states(rank: int) -> tuple[Any, Any]:
    """A state with everything in it that an optimizer may keep, seen on rank 0."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, bias = model.parameters()
    optimizer.state[bias] = {"stale": rank}
    if rank == 1:
        history = [torch.ones(2, dtype=torch.bfloat16), torch.empty(0), torch.tensor(3)]
        optimizer.state.clear()
        optimizer.state[weight] = {"history": history, "counts": (1, None, {"a": 2.5}), "name": "x"}
        optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    assert dist.group.WORLD is not None
    broadcast_optimizer_state(optimizer, 1, dist.group.WORLD, torch.device("cpu"))
    assert bias not in optimizer.state
    return optimizer.state[weight], optimizer.param_groups[0]["lr"]


def test_whatever_an_optimizer_keeps_arrives_as_it_was(world_of: WorldOf) -> None:
    for state, lr in world_of(2).run(send_states):
        assert lr == torch.tensor(0.25)
        ones, empty, three = state["history"]
        assert torch.equal(ones, torch.ones(2, dtype=torch.bfloat16)) and empty.shape == (0,)
        assert three.dtype is torch.int64 and three == 3
        assert state["counts"] == (1, None, {"a": 2.5}) and state["name"] == "x"


def rebuild_wrongly(rank: int, how: str) -> None:
    assert dist.group.WORLD is not None
    model = DistributedDataParallel(network())
    if how == "kinds":
        kinds = {0: "sgd", 1: "adam"}
        model.rebuild(dist.group.WORLD, optimizer=optimizer_of(kinds[rank], model))
    else:
        model.rebuild(dist.group.WORLD, joining=True)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kinds", r"optimizer of rank 1 is not like that of rank 0: Adam with 2, 2 parameters .* SGD with 2, 2"),
        ("joining", "All ranks of the new group are joining"),
    ],
)
def test_ranks_that_cannot_go_on_together_are_told_why(world_of: WorldOf, how: str, said: str) -> None:
    with pytest.raises(RankFailed, match=said):
        world_of(2).run(rebuild_wrongly, how)
