"""The wrapper and its policies."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from dlaunch.errors import UsageError
from dlaunch.parallel.fsdp import FullyShardedDataParallel, ShardingStrategy, by_class, by_function, by_size
from dlaunch.parallel.fsdp.fully_shard import unit_of
from dlaunch.parallel.fsdp.refusals import OF_THE_WRAPPER
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
        norms = [norm_of_gradients(module, kind) for module in (plain, model)]
        torch.testing.assert_close(norms[1], norms[0])
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


def norm_of_gradients(module: nn.Module, kind: float) -> torch.Tensor:
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients, kind)


def test_the_norm_over_all_ranks_is_that_of_the_plain_model_for_each_kind(world_of: WorldOf) -> None:
    world_of(3).run(clips)


def refuses(rank: int) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'shards'"):
        FullyShardedDataParallel(net(), shards=3)  # type: ignore[call-arg]
    world = torch.distributed.group.WORLD
    with pytest.raises(ValueError, match="HYBRID_SHARD needs"):
        FullyShardedDataParallel(net(), world, ShardingStrategy.HYBRID_SHARD)
    model = FullyShardedDataParallel(net())
    for name in OF_THE_WRAPPER:
        with pytest.raises(UsageError, match=rf"FullyShardedDataParallel\.{name} is not in dlaunch's FSDP\."):
            getattr(model, name)()
    with pytest.raises(UsageError, match=r"LOCAL_STATE_DICT is not in dlaunch's FSDP"):
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(UsageError, match="a ShardedStateDictConfig does not go with FULL_STATE_DICT"):
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, ShardedStateDictConfig())
    with pytest.raises(UsageError, match="writes nothing back"):
        FullyShardedDataParallel.summon_full_params(model, rank0_only=True).__enter__()


def test_wrong_arguments_are_refused(world_of: WorldOf) -> None:
    world_of(2).run(refuses)


def state_types(rank: int) -> None:
    model = FullyShardedDataParallel(net(), auto_wrap_policy={Block})
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, rank, 2, steps=2)
    whole, moments = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
    before = FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    assert before.state_dict_type is StateDictType.FULL_STATE_DICT
    parts: dict[str, Any] = model.state_dict()
    # A tensor without dimensions is one row.
    assert_same({name: value.full_tensor().view(whole[name].shape) for name, value in parts.items()}, whole, 0)
    part_moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    for name, values in moments["state"].items():
        assert torch.equal(
            part_moments["state"][name]["exp_avg"].full_tensor().view(values["exp_avg"].shape), values["exp_avg"]
        )
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    ):
        assert bool(model.state_dict()) == (rank == 0)
    refuses_nothing(model, optimizer, rank)
    assert FullyShardedDataParallel.get_state_dict_type(model).state_dict_type is StateDictType.SHARDED_STATE_DICT
    goes_on_from(whole, moments, model, optimizer, rank)
    goes_on_from(parts, part_moments, model, optimizer, rank)


def refuses_nothing(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Optimizer state that was made on rank 0 alone must be given to all."""
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(rank0_only=True)
    ):
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        if rank == 0:
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, moments)
        else:
            with pytest.raises(UsageError, match="this rank was given no optimizer state"):
                FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, moments)


def goes_on_from(state: Any, moments: Any, model: Any, optimizer: Any, rank: int) -> None:
    """Both forms load into another model, which then trains alike."""
    state, moments = copy.deepcopy(state), copy.deepcopy(moments)
    other = FullyShardedDataParallel(net(), auto_wrap_policy={Block}, transport="torch")
    other.load_state_dict(state)
    its = OPTIMIZERS["adam"](other.parameters())
    FullyShardedDataParallel.optim_state_dict_to_load(other, its, moments, load_directly=True)
    model.load_state_dict(state)
    optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, moments))
    assert train(other, its, rank, 2, steps=3, seed=8) == train(model, optimizer, rank, 2, steps=3, seed=8)


def test_state_dicts_are_whole_or_parts_as_was_set_and_both_load(world_of: WorldOf) -> None:
    world_of(2).run(state_types)


def by_hand(rank: int) -> None:
    plain, inner = net(), net()
    inner.blocks = nn.ModuleList(FullyShardedDataParallel(block) for block in inner.blocks)  # type: ignore[assignment]
    model = FullyShardedDataParallel(inner)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    assert [wrapper.check_is_root() for wrapper in (model, inner.blocks[0])] == [True, False]  # type: ignore[operator]
    assert len(FullyShardedDataParallel.fsdp_modules(model, root_only=True)) == 1
    optimizer, theirs = (OPTIMIZERS["adamw"](module.parameters()) for module in (model, plain))
    expected = train_alone(plain, theirs, 2, steps=3)
    assert train(model, optimizer, rank, 2, steps=3) == expected[rank]
    assert_same(model.state_dict(), dict(plain.state_dict()), 0)
    outer = nn.Sequential(model)
    state = {f"0.{name}": value for name, value in net().state_dict().items()}
    outer.load_state_dict(state)
    assert_same(dict(outer.state_dict()), state, 0)


def test_wrappers_within_wrappers_and_plain_modules_keep_the_plain_names(world_of: WorldOf) -> None:
    world_of(2).run(by_hand)


def summons(rank: int) -> None:
    plain = net()
    model = FullyShardedDataParallel(net(), auto_wrap_policy={Block})
    torch.autograd.backward(model(torch.arange(8)).sum())
    torch.autograd.backward(plain(torch.arange(8)).sum())
    rows = dict(model.named_parameters())
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        for (name, parameter), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter, whole), name
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, whole.grad), name  # type: ignore[arg-type]
        with torch.no_grad():
            model.norm.bias.fill_(3.0)
            model.norm.bias.grad.fill_(5.0)
    assert all(parameter is rows[name] for name, parameter in model.named_parameters())
    assert (model.state_dict()["norm.bias"] == 3).all()
    assert (model.norm.bias.grad == 5).all()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
        assert (model.blocks[0].up.weight.shape == (7, 6)) == (rank == 0)
        model.norm.bias.data.zero_()
    with FullyShardedDataParallel.summon_full_params(model.blocks[0], recurse=False):
        assert model.blocks[0].up.weight.shape == (7, 6)
        assert model.blocks[1].up.weight.shape != (7, 6)
    model.apply(make_ones)
    assert (model.state_dict()["blocks.2.down.weight"] == 1).all()


def make_ones(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


def test_whole_parameters_and_gradients_are_summoned_and_written_back(world_of: WorldOf) -> None:
    world_of(2).run(summons)
