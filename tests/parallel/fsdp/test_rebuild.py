"""Worlds that change: rows and optimizer state move, and the loss of a rank loses nothing."""

from __future__ import annotations

import datetime
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from dlaunch.parallel.fsdp import fully_shard
from dlaunch.parallel.fsdp.fully_shard import unit_of
from dlaunch.parallel.fsdp.optimizer_state import full_optimizer_state_dict
from dlaunch.parallel.fsdp.rebuild import rebuild
from dlaunch.parallel.fsdp.replicas import Replicas
from dlaunch.parallel.fsdp.state import full_state_dict

from ..worlds import RankFailed, World, WorldOf
from .fsdp_models import OPTIMIZERS, Net, assert_same, batches, net, shard_blocks, train, train_alone
from .matrix import hybrid_groups


def wholes(model: Net, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """All parameters and all of the optimizer's state."""
    state = full_optimizer_state_dict(model, optimizer, rank0_only=False)
    return full_state_dict(model, rank0_only=False), state["state"]


def assert_equal(ours: Any, theirs: Any) -> None:
    assert_same(ours[0], theirs[0], 0)
    assert list(ours[1]) == list(theirs[1])
    for name, state in theirs[1].items():
        assert_same(dict(sorted(ours[1][name].items())), dict(sorted(state.items())), 0)


def resized(rank: int, optimizer_name: str, transport: str) -> None:
    small = dist.new_group([0, 1])
    everyone = dist.group.WORLD
    assert everyone is not None
    model = shard_blocks(net(), transport=transport, process_group=small if rank < 2 else (None, None))
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    if rank < 2:
        train(model, optimizer, rank, 2, steps=4)
    plain = net()
    theirs = OPTIMIZERS[optimizer_name](plain.parameters())
    train_alone(plain, theirs, 2, steps=4)
    parameters = list(model.parameters())

    rebuild(model, everyone, optimizer, joining=rank == 2)
    expected = dict(plain.state_dict()), {n: dict(theirs.state[p]) for n, p in plain.named_parameters()}
    assert_equal(wholes(model, optimizer), expected)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))

    rebuild(model, small if rank < 2 else None, optimizer, through=everyone)
    if rank < 2:
        assert_equal(wholes(model, optimizer), expected)
        more = train_alone(plain, theirs, 2, steps=3, seed=8)
        assert train(model, optimizer, rank, 2, steps=3, seed=8) == more[rank]


@pytest.mark.parametrize(("optimizer", "transport"), [("sgd", "torch"), ("adam", "shared_memory")])
def test_a_rank_joins_and_leaves_and_training_goes_on_with_the_same_bits(
    world_of: WorldOf, optimizer: str, transport: str
) -> None:
    world_of(3).run(resized, optimizer, transport)


def lose_a_rank(rank: int, transport: str, dies: int) -> None:
    # A survivor may wait so long for another one that has raised already.
    patient = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=5))
    model = shard_blocks(net(), transport=transport, process_group=patient)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    replicas = Replicas(model, optimizer, every=2)
    at_refresh: Any = None
    data = batches(20, 12)

    def step(number: int, place: int, size: int) -> float:
        tokens, targets = data[number]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens[place::size]), targets[place::size])
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()

    for number in range(1, 6):  # refreshes after the steps 2 and 4; step 5 is lost
        step(number, rank, 3)
        replicas.after_step(number)
        if number == 4:
            at_refresh = wholes(model, optimizer)
    replicas.finish()
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        for number in range(6, 20):
            step(number, rank, 3)
    living = [other for other in range(3) if other != dies]
    group = dist.new_group(living, use_local_synchronization=True)
    assert rebuild(model, group, optimizer, replicas=replicas) == 4
    assert_equal(wholes(model, optimizer), at_refresh)

    plain = net()
    plain.load_state_dict(at_refresh[0])
    theirs = OPTIMIZERS["adam"](plain.parameters())
    states = {index: at_refresh[1][name] for index, (name, _) in enumerate(plain.named_parameters())}
    theirs.load_state_dict({"state": states, "param_groups": theirs.state_dict()["param_groups"]})
    expected = train_alone(plain, theirs, 2, steps=3)
    place = living.index(rank)
    assert train(model, optimizer, place, 2, steps=3) == expected[place]
    replicas.refresh(9)
    replicas.finish()
    assert sorted(replicas.complete()) == [9]

    at_refresh = wholes(model, optimizer)  # and once more: one of two is lost
    train(model, optimizer, place, 2, steps=1, seed=7)
    if place == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert rebuild(model, dist.new_group([rank], use_local_synchronization=True), optimizer, replicas=replicas) == 9
    assert_equal(wholes(model, optimizer), at_refresh)


@pytest.mark.parametrize(("transport", "dies"), [("torch", 2), ("shared_memory", 0)])
def test_after_the_loss_of_a_rank_every_value_is_that_of_the_last_refresh(transport: str, dies: int) -> None:
    world = World(3)
    try:
        world.start(lose_a_rank, transport, dies)
        survivor, *others = sorted({0, 1, 2} - {dies})
        world.result(survivor)
        for rank in (dies, *others):
            with pytest.raises(RankFailed, match=f"rank {rank} died"):
                world.result(rank)
    finally:
        world.close()


def lose_a_rank_in_a_refresh(rank: int, begin: list[int]) -> int:
    """Rank 2 dies in the refresh of step 4, which the ranks in ``begin`` had begun."""
    model = shard_blocks(net(), transport="torch")
    optimizer = OPTIMIZERS["adam"](model.parameters())
    replicas = Replicas(model, optimizer)
    at_step = {}
    for step in (2, 4):
        train(model, optimizer, rank, 3, steps=2, seed=step)
        at_step[step] = wholes(model, optimizer)
        if step == 2 or rank in begin:
            replicas.refresh(step)
        if step == 2:
            replicas.finish()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    group = dist.new_group([0, 1], use_local_synchronization=True)
    step = rebuild(model, group, optimizer, replicas=replicas)
    assert_equal(wholes(model, optimizer), at_step[step])
    return step


@pytest.mark.parametrize(
    ("begin", "taken"),
    [
        pytest.param([0, 1, 2], (2, 4), id="all had begun it"),
        pytest.param([0, 1], (2,), id="the lost one had not"),
        pytest.param([1], (2,), id="the neighbour of a rank that waits for it lives and had not"),
    ],
)
def test_the_loss_of_a_rank_in_a_refresh_leaves_the_one_before(begin: list[int], taken: tuple[int, ...]) -> None:
    world = World(3)
    try:
        world.start(lose_a_rank_in_a_refresh, begin)
        steps = [world.result(rank) for rank in range(2)]
    finally:
        world.close()
    assert steps[0] == steps[1]
    assert steps[0] in taken


def goes_back_to_the_start(rank: int) -> None:
    model = shard_blocks(net())
    optimizer = OPTIMIZERS["adam"](model.parameters())
    replicas = Replicas(model, optimizer)
    replicas.refresh(0)  # the optimizer has no state yet
    train(model, optimizer, rank, 2, steps=2)
    optimizer.param_groups[0].update(lr=7.0, betas=(0.1, 0.2))
    assert rebuild(model, dist.group.WORLD, optimizer, replicas=replicas) == 0
    assert not any(optimizer.state.values())
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.01, (0.9, 0.999))
    assert_same(full_state_dict(model, rank0_only=False), dict(net().state_dict()), 0)


def test_a_refresh_before_the_first_step_has_no_optimizer_state(world_of: WorldOf) -> None:
    world_of(2).run(goes_back_to_the_start)


def joins_with_other_values(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    kept = model[2].bias
    assert isinstance(kept, nn.Parameter)
    small = dist.new_group([0, 1])
    fully_shard(model, process_group=small if rank < 2 else (None, None), ignored_params=[kept])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if rank < 2 else 0.1, momentum=0.9)
    if rank < 2:
        torch.autograd.backward(model(torch.randn(6, 3)).square().sum())
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.25  # as a scheduler does
    running_mean = model[1].get_buffer("running_mean")
    mean, bias = running_mean.clone(), kept.detach().clone()
    assert rebuild(model, dist.group.WORLD, optimizer, joining=rank == 2) == 1
    assert optimizer.param_groups[0]["lr"] == 0.25
    means, biases = (torch.empty(3, *value.shape) for value in (mean, bias))
    dist.all_gather(list(means), running_mean)
    dist.all_gather(list(biases), kept.detach())
    assert torch.equal(means[2], means[0])
    assert torch.equal(biases[2], biases[0])
    if rank < 2:  # each rank's own
        assert torch.equal(means[rank], mean)
        assert torch.equal(biases[rank], bias)
    assert not torch.equal(means[0], means[1])


def test_a_rank_that_joins_gets_the_learning_rate_the_buffers_and_what_is_not_sharded(world_of: WorldOf) -> None:
    world_of(3).run(joins_with_other_values)


def a_step_ahead(rank: int) -> str:
    """Rank 0 made a step that the others did not, as it may happen when one is lost in between."""
    hybrid = shard_blocks(net(), process_group=hybrid_groups(), transport="torch")
    optimizer = OPTIMIZERS["adam"](hybrid.parameters())
    train(hybrid, optimizer, rank, 4, steps=3)
    before = wholes(hybrid, optimizer)
    three = dist.new_group([0, 1, 2])
    if rank == 0:
        optimizer.step()
    if rank < 3:
        assert rebuild(hybrid, three, optimizer) == 3
        assert_equal(wholes(hybrid, optimizer), before)

    pair = dist.new_group([0, 1])
    message = ""
    if rank < 2:
        full = shard_blocks(net(), process_group=pair, transport="torch")
        optimizer = OPTIMIZERS["sgd"](full.parameters())
        train(full, optimizer, rank, 2, steps=2)
        if rank == 0:
            optimizer.step()
        with pytest.raises(RuntimeError) as caught:
            rebuild(full, pair, optimizer)
        message = str(caught.value)
    dist.barrier()
    return message


def test_rows_of_different_steps_are_never_mixed(world_of: WorldOf) -> None:
    said = world_of(4).run(a_step_ahead)
    assert "rank 0 holds step 3, rank 1 holds step 2" in said[0]
    assert said[0] == said[1]


def cut_over_two_groups(rank: int) -> None:
    model = net()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    fully_shard(model.blocks[0], process_group=alone)
    fully_shard(model)
    with pytest.raises(ValueError, match="the units of this model are cut over several"):
        Replicas(model)


def test_replicas_of_a_model_cut_over_several_groups_are_refused(world_of: WorldOf) -> None:
    world_of(2).run(cut_over_two_groups)


def without_copies(rank: int) -> str:
    model = shard_blocks(net())
    pair = dist.new_group([0, 1])
    message = ""
    if rank < 2:
        with pytest.raises(RuntimeError) as caught:
            rebuild(model, pair)
        message = str(caught.value)
    dist.barrier()
    return message


def test_rows_that_nobody_has_are_named(world_of: WorldOf) -> None:
    said = world_of(3).run(without_copies)
    assert "The rows of rank 2 of the old world are lost" in said[0]
    assert said[0] == said[1]


def hybrid_grows_smaller(rank: int) -> None:
    model = shard_blocks(net(), process_group=hybrid_groups(), transport="torch")
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, rank, 4, steps=3)
    before = wholes(model, optimizer)
    three, everyone = dist.new_group([0, 1, 2]), dist.group.WORLD
    with pytest.raises(ValueError, match="needs through="):
        rebuild(model, hybrid_groups(), optimizer)
    if rank < 3:  # rank 3 is lost, and rank 1 has a copy of its rows
        rebuild(model, three, optimizer)
        assert unit_of(model).replicas is None
        assert_equal(wholes(model, optimizer), before)
        train(model, optimizer, rank, 3, steps=2, seed=7)
        before = wholes(model, optimizer)
    rebuild(model, hybrid_groups(), optimizer, joining=rank == 3, through=everyone)
    after = wholes(model, optimizer)
    if rank < 3:
        assert_equal(after, before)
    plain = net()
    plain.load_state_dict(after[0])
    theirs = OPTIMIZERS["adam"](plain.parameters())
    states = {index: after[1][name] for index, (name, _) in enumerate(plain.named_parameters())}
    theirs.load_state_dict({"state": states, "param_groups": theirs.state_dict()["param_groups"]})
    expected = train_alone(plain, theirs, 4, steps=2, seed=9)
    assert train(model, optimizer, rank, 4, steps=2, seed=9) == pytest.approx(expected[rank], abs=1e-5)


def test_a_hybrid_model_loses_a_rank_whose_rows_another_has_and_becomes_hybrid_again(world_of: WorldOf) -> None:
    world_of(4).run(hybrid_grows_smaller)
