"""The wrapper and its policies."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from dlaunch.parallel.fsdp import FullyShardedDataParallel, ShardingStrategy, by_class, by_function, by_size
from dlaunch.parallel.fsdp.fully_shard import unit_of
from dlaunch.parallel.fsdp.wrap_policies import WrapPolicy, modules_to_shard

from ..worlds import WorldOf
from .fsdp_models import OPTIMIZERS, Block, Net, assert_same, net, train, train_alone


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (by_class({Block}), ["blocks.0", "blocks.1", "blocks.2"]),
        (ModuleWrapPolicy({Block}), ["blocks.0", "blocks.1", "blocks.2"]),
        (by_size(60), ["tokens", "blocks.0", "blocks.1", "blocks.2", "head"]),
        (
            partial(size_based_auto_wrap_policy, min_num_params=60),
            ["tokens", "blocks.0", "blocks.1", "blocks.2", "head"],
        ),
        (by_size(99), []),
        (by_function(lambda module: isinstance(module, nn.LayerNorm)), ["norm"]),
        (by_class({Block, nn.Linear}), [f"blocks.{n}{p}" for n in range(3) for p in (".up", ".down", "")] + ["head"]),
    ],
)
def test_policies_choose_the_same_modules_as_torchs(policy: WrapPolicy, expected: list[str]) -> None:
    model = net()
    names = {id(module): name for name, module in model.named_modules()}
    assert [names[id(module)] for module in modules_to_shard(model, policy)] == expected


def wrapped(rank: int, options: dict[str, Any]) -> None:
    plain = net()
    model = FullyShardedDataParallel(net(), auto_wrap_policy={Block}, **options)
    assert len(FullyShardedDataParallel.fsdp_modules(model)) == 4
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert isinstance(model.blocks[0], Block)
    optimizer, theirs = (OPTIMIZERS["adamw"](module.parameters()) for module in (model, plain))
    expected = train_alone(plain, theirs, 2, steps=5)
    assert train(model, optimizer, rank, 2, steps=5) == expected[rank]
    assert_same(model.state_dict(), dict(plain.state_dict()), 0)
    model.load_state_dict(net().state_dict())
    assert_same(model.state_dict(), dict(net().state_dict()), 0)
    assert bool(model.state_dict(rank0_only=True)) == (rank == 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sharding_strategy": TorchStrategy.SHARD_GRAD_OP, "use_orig_params": True, "transport": "torch"},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"cpu_offload": CPUOffload(offload_params=True), "limit_all_gathers": True},
        {"device_id": torch.device("cpu"), "sync_module_states": True},
    ],
)
def test_the_wrapper_trains_saves_and_loads_under_plain_names(world_of: WorldOf, options: dict[str, Any]) -> None:
    world_of(2).run(wrapped, options)


def from_first_rank(rank: int) -> None:
    torch.manual_seed(rank)
    model = FullyShardedDataParallel(Net(), sync_module_states=True, mixed_precision=MixedPrecision(torch.bfloat16))
    torch.manual_seed(0)
    assert_same(model.state_dict(), dict(Net().state_dict()), 0)
    assert model(torch.arange(4)).dtype is torch.bfloat16
    assert unit_of(model.module).policy.param_dtype is torch.bfloat16


def test_the_wrapper_takes_the_first_ranks_values_and_torchs_mixed_precision(world_of: WorldOf) -> None:
    world_of(2).run(from_first_rank)


def clips(rank: int) -> None:
    plain = net()
    model = FullyShardedDataParallel(net(), auto_wrap_policy={Block})
    tokens = torch.arange(11)
    for module in (plain, model):
        torch.autograd.backward(module(tokens).square().sum())
    for kind in (1.0, 2.0, float("inf")):
        theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), 3.0, kind)
        torch.testing.assert_close(model.clip_grad_norm_(3.0, kind), theirs)
    with model.no_sync():
        torch.autograd.backward(model(tokens).sum())
    assert unit_of(model.module).run.reduces
    parameter = model.blocks[0].up.weight
    assert parameter.grad is not None
    parameter.grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_the_norm_over_all_ranks_is_that_of_the_plain_model_for_each_kind(world_of: WorldOf) -> None:
    world_of(3).run(clips)


def refuses(rank: int) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'shards'"):
        FullyShardedDataParallel(net(), shards=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="HYBRID_SHARD needs"):
        FullyShardedDataParallel(net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def test_wrong_arguments_are_refused(world_of: WorldOf) -> None:
    world_of(2).run(refuses)
