"""Every feature alone and every pair of them: the same training as with the naive class, bit for bit with two ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlaunch.parallel import DistributedDataParallel, NaiveDistributedDataParallel, allreduce_hook

from .ddp_models import Everything, batches, loss_of
from .worlds import WorldOf

STEPS = 3
ROWS = 6


@dataclass(frozen=True)
class Feature:
    """One thing that a user may do: arguments of DDP and of the model, and a way to train."""

    name: str
    ddp: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    ways: frozenset[str] = frozenset()
    excludes: frozenset[str] = frozenset()


def way(name: str, *excludes: str) -> Feature:
    return Feature(name, ways=frozenset([name]), excludes=frozenset(excludes))


FEATURES = [
    Feature("small buckets", ddp={"bucket_cap_mb": 0.0002}),
    Feature("bucket list", ddp={"bucket_cap_mb_list": [0.0001, 0.0004]}),
    Feature("own gradients", ddp={"gradient_as_bucket_view": False}),
    Feature("find unused", ddp={"find_unused_parameters": True}, model={"unused": True}),
    Feature(
        "static graph",
        ddp={"static_graph": True},
        model={"unused": True},
        excludes=frozenset({"freeze later"}),
    ),
    Feature("no buffers", ddp={"forward_sync_buffers": False}),
    Feature("dense embedding", model={"sparse": False}),
    Feature("checkpoint", model={"recompute": False}),
    Feature(
        "re-entrant checkpoint",
        model={"recompute": True},
        excludes=frozenset({"find unused", "checkpoint", "two forwards"}),
    ),
    way("no_sync"),
    way("two forwards"),
    way("two backwards"),
    way("zeros, not none"),
    way("keep gradients"),
    way("freeze later"),
    way("hook"),
    way("adam"),
]


def compatible(first: Feature, second: Feature) -> bool:
    return second.name not in first.excludes and first.name not in second.excludes


def train(model: nn.Module, ways: frozenset[str], rank: int, size: int) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if "adam" in ways:  # not for sparse gradients
        parameters = [p for n, p in model.named_parameters() if p.requires_grad and "embedding" not in n]
        optimizer: torch.optim.Optimizer = torch.optim.Adam(
            parameters, lr=0.01, eps=0.01
        )  # a smaller one would magnify rounding
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.05)
    for number, (inputs, targets) in enumerate(batches(STEPS, ROWS * size)):
        if "freeze later" in ways and number in (1, 2):
            model.get_parameter("module.blocks.1.0.weight").requires_grad_(number == 2)
        if "keep gradients" not in ways:
            optimizer.zero_grad(set_to_none="zeros, not none" not in ways)
            for parameter in model.parameters():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = None
        one_step(model, inputs[rank::size], targets[rank::size], ways)
        optimizer.step()


def one_step(model: nn.Module, inputs: Tensor, targets: Tensor, ways: frozenset[str]) -> None:
    if "no_sync" in ways:
        with model.no_sync():  # type: ignore[operator]
            torch.autograd.backward(loss_of(model(inputs * 0.5), targets))
    loss = loss_of(model(inputs), targets)
    if "two forwards" in ways:
        loss = loss + loss_of(model(inputs * 2), targets)
    second = loss_of(model(inputs - 1), targets) if "two backwards" in ways else None
    torch.autograd.backward(loss)
    if second is not None:
        torch.autograd.backward(second)


def check_against_naive(rank: int, size: int, names: tuple[str, ...], transport: str) -> None:
    features = [feature for feature in FEATURES if feature.name in names]
    ddp_arguments = {key: value for feature in features for key, value in feature.ddp.items()}
    model_arguments = {key: value for feature in features for key, value in feature.model.items()}
    ways = frozenset(itertools.chain.from_iterable(feature.ways for feature in features))
    torch.manual_seed(rank)
    network = Everything(**model_arguments)
    ours = DistributedDataParallel(network, transport=transport, **ddp_arguments)
    twin = Everything(**model_arguments)
    twin.load_state_dict(network.state_dict())
    naive = NaiveDistributedDataParallel(twin)
    if "hook" in ways:
        ours.register_comm_hook(None, allreduce_hook)
    train(ours, ways, rank, size)
    train(naive, ways, rank, size)
    for (name, parameter), other in zip(network.named_parameters(), twin.parameters(), strict=True):
        what = f"{name} of rank {rank} with {names}"
        assert_same(parameter, other, size, what)
        assert (parameter.grad is None) == (other.grad is None), what
        if parameter.grad is not None and other.grad is not None:
            assert_same(parameter.grad.to_dense(), other.grad.to_dense(), size, f"gradient of {what}")


def assert_same(mine: Tensor, expected: Tensor, size: int, what: str) -> None:
    """Bit for bit where the order of a sum cannot differ, else within some units in the last place."""
    bound = 0.0 if size <= 2 else 1.0
    try:
        torch.testing.assert_close(mine, expected, rtol=2e-5 * bound, atol=2e-6 * bound)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def check_all(rank: int, size: int, cases: list[tuple[str, ...]], transport: str) -> list[str]:
    failures = []
    for names in cases:
        try:
            check_against_naive(rank, size, names, transport)
        except (AssertionError, RuntimeError) as error:
            failures.append(f"{names}: {error}")
            if not isinstance(error, AssertionError):
                raise AssertionError("\n".join(failures)) from error
    return failures


ALONE: list[tuple[str, ...]] = [(), *((feature.name,) for feature in FEATURES)]
PAIRS = [
    (first.name, second.name) for first, second in itertools.combinations(FEATURES, 2) if compatible(first, second)
]


@pytest.mark.parametrize(
    ("size", "every", "transport"),
    [(1, 1, "torch"), (2, 1, "torch"), (3, 1, "shared_memory"), (4, 3, "torch"), (5, 3, "shared_memory")],
)
def test_each_feature_alone_trains_as_the_naive_class_does(
    world_of: WorldOf, size: int, every: int, transport: str
) -> None:
    for failures in world_of(size).run(check_all, size, ALONE[::every], transport):
        assert failures == []


@pytest.mark.parametrize(("size", "every", "transport"), [(2, 1, "torch"), (2, 5, "shared_memory"), (3, 8, "torch")])
def test_each_pair_of_features_trains_as_the_naive_class_does(
    world_of: WorldOf, size: int, every: int, transport: str
) -> None:
    for failures in world_of(size).run(check_all, size, PAIRS[::every], transport):
        assert failures == []
