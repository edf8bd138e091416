"""Training against a single process that does the work of all ranks: the part of the matrix that every run of the tests
looks at. The whole of it, fifty steps for each pair of options in worlds of 1 to 4, is ``matrix.py``.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from dlaunch.parallel.fsdp import fully_shard
from dlaunch.parallel.fsdp.state import full_state_dict

from ..worlds import WorldOf
from .fsdp_models import OPTIMIZERS, Net, assert_same, net, shard_blocks, train, train_alone
from .matrix import GRAPHS, OPTIONS, Case, cases_of, compare_many, options_for

TRANSPORTS = OPTIONS["transport"]
STRATEGIES = OPTIONS["strategy"][:4]
STEPS = 12


def test_combinations_have_each_pair_of_values_once_at_least() -> None:
    options = options_for(4)
    cases = cases_of(options)
    for (one, values), (other, others) in itertools.combinations(options.items(), 2):
        met = {(getattr(case, one), getattr(case, other)) for case in cases}
        assert met == set(itertools.product(values, others))
    assert len(cases) < 60


@pytest.mark.parametrize(("optimizer", "transport"), list(zip(OPTIMIZERS, TRANSPORTS, strict=True)))
def test_fifty_steps_give_the_same_bits_with_each_optimizer_and_stay_within_the_bound_with_clipping(
    world_of: WorldOf, optimizer: str, transport: str
) -> None:
    clipped = Case(optimizer=optimizer, transport=transport, clip=0.3, graph="frozen")
    world_of(2).run(compare_many, 2, [Case(optimizer=optimizer, transport=transport), clipped], 50)


@pytest.mark.parametrize("size", [1, 2])
def test_each_strategy_and_transport_gives_the_same_bits(world_of: WorldOf, size: int) -> None:
    transports = TRANSPORTS if size == 2 else TRANSPORTS[:1]
    cases = [Case(strategy=s, transport=t) for s, t in itertools.product(STRATEGIES, transports)]
    world_of(size).run(compare_many, size, cases, STEPS)


@pytest.mark.parametrize("transport", ["torch", "shared_memory"])
def test_each_kind_of_graph_gives_the_same_bits(world_of: WorldOf, transport: str) -> None:
    cases = [Case(graph=graph, optimizer="adamw", transport=transport) for graph in GRAPHS]
    world_of(2).run(compare_many, 2, cases, STEPS)


def test_each_pair_of_precision_offload_accumulation_and_units_gives_the_same_bits(world_of: WorldOf) -> None:
    cases = cases_of({name: OPTIONS[name] for name in ("narrow", "offload", "accumulate", "units")})
    world_of(2).run(compare_many, 2, cases, STEPS // 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_by_the_global_norm_changes_training_as_in_one_process(world_of: WorldOf, strategy: str) -> None:
    world_of(2).run(compare_many, 2, [Case(strategy=strategy, clip=0.3, optimizer="adam")], STEPS)


@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_than_two_stay_within_the_bound(world_of: WorldOf, size: int) -> None:
    cases = [Case(transport=t, optimizer=o, clip=0.3) for t, o in zip(TRANSPORTS, OPTIMIZERS, strict=True)]
    if size == 4:
        pairs = itertools.product(("hybrid", "smaller world"), ("torch", "shared_memory"))
        cases += [Case(strategy=s, transport=t, clip=0.5) for s, t in pairs]
    world_of(size).run(compare_many, size, cases, STEPS)


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
