"""Fifty steps against a single process that does the work of all ranks, for each strategy, option and pair of them.

With one or two ranks there is one order of summation, and every bit must agree. With more, gradients are summed in
another order than the oracle's, and the norm for clipping is too: some ulp in each of fifty steps. Those cases run in
float64, where an ulp is 2e-16, and must agree to 1e-9; a wrong factor or a lost gradient is off by 1e-2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlaunch.parallel.fsdp import fully_shard
from dlaunch.parallel.fsdp.state import full_state_dict

from ..worlds import WorldOf
from .fsdp_models import OPTIMIZERS, Net, assert_same, net, shard_blocks, train, train_alone

TRANSPORTS = ("torch", "flat", "shared_memory")
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen": {"frozen": True},
    "unused": {"unused": True},
    "recomputed": {"recompute": False},
    "recomputed re-entrantly": {"recompute": True},
    "repeated": {"repeat": 2},
}


def options_of(strategy: str) -> dict[str, Any]:
    world = dist.group.WORLD
    if strategy == "no shard":
        return {"process_group": (None, world)}
    if strategy == "hybrid":
        ranks, size = dist.get_rank(), dist.get_world_size()
        inner = [dist.new_group([0, 1]), dist.new_group([2, 3])] if size == 4 else [world]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])] if size == 4 else [None]
        return {"process_group": (inner[ranks // 2], across[ranks % 2])} if size == 4 else {}
    return {"reshard_after_forward": {"full": True, "root kept": None, "grad and optimizer": False}[strategy]}


def compare(
    rank: int, size: int, strategy: str, model: str, transport: str, optimizer: str, clip: float | None, steps: int
) -> None:
    bound = 0.0 if size <= 2 and clip is None else 1e-9
    dtype = torch.float64 if bound else torch.float32
    plain = net(**MODELS[model]).to(dtype)
    expected = train_alone(plain, OPTIMIZERS[optimizer](plain.parameters()), size, steps=steps, clip=clip)
    sharded = shard_blocks(net(**MODELS[model]).to(dtype), transport=transport, **options_of(strategy))
    losses = train(sharded, OPTIMIZERS[optimizer](sharded.parameters()), rank, size, steps=steps, clip=clip)
    assert losses == pytest.approx(expected[rank], rel=bound, abs=bound)
    assert_same(full_state_dict(sharded, rank0_only=False), dict(plain.state_dict()), bound)


def compare_many(rank: int, size: int, cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        try:
            compare(rank, size, *case)
        except Exception as error:
            raise AssertionError(f"{case}") from error


STRATEGIES = ("full", "root kept", "grad and optimizer", "no shard")


def pairs(transports: Sequence[str]) -> list[tuple[str, str]]:
    """Every strategy with every transport."""
    return list(itertools.product(STRATEGIES, transports))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_fifty_steps_give_the_same_bits_with_each_optimizer_strategy_and_transport(
    world_of: WorldOf, size: int, optimizer: str
) -> None:
    cases = [(s, "plain", t, optimizer, None, 50) for s, t in pairs(TRANSPORTS if optimizer == "sgd" else ["torch"])]
    world_of(size).run(compare_many, size, cases)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "plain"])
def test_fifty_steps_give_the_same_bits_with_each_kind_of_graph(world_of: WorldOf, model: str) -> None:
    cases = [(s, model, t, "adamw", None, 50) for s, t in zip(("full", "root kept"), TRANSPORTS[::2], strict=True)]
    world_of(2).run(compare_many, 2, cases)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_clipping_by_the_global_norm_changes_training_as_in_one_process(world_of: WorldOf, optimizer: str) -> None:
    cases = [(s, "frozen", "shared_memory", optimizer, 0.3, 50) for s in STRATEGIES]
    world_of(2).run(compare_many, 2, cases)


@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_than_two_stay_within_the_bound(world_of: WorldOf, size: int) -> None:
    cases: list[tuple[Any, ...]] = [
        ("full", "plain", t, o, None, 50) for t, o in zip(TRANSPORTS, OPTIMIZERS, strict=True)
    ]
    cases += [
        ("root kept", "unused", "shared_memory", "adamw", 0.3, 50),
        ("no shard", "frozen", "torch", "sgd", 0.3, 50),
    ]
    world_of(size).run(compare_many, size, cases)


def test_hybrid_sharding_averages_over_both_groups(world_of: WorldOf) -> None:
    world_of(4).run(compare_many, 4, [("hybrid", "plain", t, "sgd", 0.5, 50) for t in ("torch", "shared_memory")])


def one_unit_and_nested(rank: int) -> None:
    plain = net()
    expected = train_alone(plain, OPTIMIZERS["adam"](plain.parameters()), 2)
    nested = net()
    fully_shard(nested.blocks[0].up)
    for block in nested.blocks:
        fully_shard(block)
    for model in (fully_shard(net()), fully_shard(nested)):
        assert train(model, OPTIMIZERS["adam"](model.parameters()), rank, 2) == expected[rank]


def test_one_unit_and_units_within_units_give_the_same_bits(world_of: WorldOf) -> None:
    world_of(2).run(one_unit_and_nested)


class TiedAcross(torch.nn.Module):
    """Two blocks with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.out = torch.nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.one_hot(tokens % 6, 6).float()
        logits: torch.Tensor = self.out(torch.tanh(self.second(torch.tanh(self.first(hidden)))))
        return logits


def tied_across_units(rank: int) -> None:
    torch.manual_seed(0)
    plain = TiedAcross()
    torch.manual_seed(0)
    sharded = TiedAcross()
    fully_shard(sharded.first)
    with pytest.raises(ValueError, match=r"parameter weight is shared with a unit outside of this Linear"):
        fully_shard(sharded.second)
    fully_shard(sharded)
    assert sharded.first.weight is sharded.second.weight
    assert len(list(sharded.parameters())) == len(list(plain.parameters()))
    expected = train_alone(plain, OPTIMIZERS["adam"](plain.parameters()), 2)
    assert train(sharded, OPTIMIZERS["adam"](sharded.parameters()), rank, 2) == expected[rank]
    assert_same(full_state_dict(sharded, rank0_only=False), dict(plain.state_dict()), 0)


def test_a_weight_tied_across_units_moves_to_the_unit_that_has_both(world_of: WorldOf) -> None:
    world_of(2).run(tied_across_units)


def accumulate(rank: int, transport: str, communicate: bool) -> None:
    plain, sharded = net(), shard_blocks(net(), transport=transport)
    ours, theirs = (OPTIMIZERS["sgd"](model.parameters()) for model in (sharded, plain))
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        micro = [torch.randint(11, (8,), generator=generator) for _ in range(3)]
        for number, tokens in enumerate(micro):
            sharded.set_requires_gradient_sync(communicate or number == len(micro) - 1)  # type: ignore[operator]
            torch.autograd.backward(loss(sharded, tokens[rank::2]))
            holds_shards = all(p.grad is not None for p in sharded.parameters())
            assert holds_shards == (communicate or number == len(micro) - 1)
        # The oracle sums in the same order: micro-batches first without communication, ranks first with it.
        for parameter, total in zip(plain.parameters(), sums(plain, micro, communicate), strict=True):
            parameter.grad = total / 2 if not communicate else total
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_state_dict(sharded, rank0_only=False), dict(plain.state_dict()), 0)


def loss(model: Net, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens), tokens)


def sums(model: Net, micro: list[torch.Tensor], communicate: bool) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    parts = [[torch.autograd.grad(loss(model, tokens[rank::2]), parameters) for tokens in micro] for rank in range(2)]
    result = []
    for index in range(len(parameters)):
        a, b = ([part[index] for part in parts[rank]] for rank in range(2))
        if communicate:
            result.append((a[0] + b[0]) / 2 + (a[1] + b[1]) / 2 + (a[2] + b[2]) / 2)
        else:
            result.append((a[0] + a[1] + a[2]) + (b[0] + b[1] + b[2]))
    return result


@pytest.mark.parametrize("communicate", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_accumulated_gradients_are_the_sum_of_micro_batches(
    world_of: WorldOf, transport: str, communicate: bool
) -> None:
    world_of(2).run(accumulate, transport, communicate)
