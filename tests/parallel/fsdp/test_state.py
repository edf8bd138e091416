"""State dicts out and in: whole and in parts, with other world sizes, with plain modules and torch's FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from dlaunch.parallel.checkpoint.shards import assemble
from dlaunch.parallel.fsdp import fully_shard
from dlaunch.parallel.fsdp.fully_shard import unit_of
from dlaunch.parallel.fsdp.materialize import materialize
from dlaunch.parallel.fsdp.optimizer_state import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    sharded_optimizer_state_dict,
)
from dlaunch.parallel.fsdp.state import (
    dtensor_state_dict,
    full_state_dict,
    load_full_state_dict,
    sharded_state_dict,
)

from ..worlds import WorldOf
from .fsdp_models import OPTIMIZERS, Net, assert_same, net, shard_blocks, train, train_alone


def full_on_rank_0(rank: int, transport: str) -> None:
    model = shard_blocks(net(), transport=transport)
    state = full_state_dict(model)
    if rank != 0:
        assert state == {}
        return
    plain = Net()
    plain.load_state_dict(state)
    assert_same(dict(plain.state_dict()), dict(net().state_dict()), 0)
    assert state["head.weight"] is state["tokens.weight"]  # tied ones are put together once


@pytest.mark.parametrize("transport", ["torch", "shared_memory"])
def test_a_full_state_dict_is_on_rank_0_and_loads_into_the_plain_module(world_of: WorldOf, transport: str) -> None:
    world_of(3).run(full_on_rank_0, transport)


def from_rank_0(rank: int) -> None:
    model = shard_blocks(Net())
    load_full_state_dict(model, net().state_dict() if rank == 0 else {}, from_rank0=True)
    assert_same(full_state_dict(model, rank0_only=False), dict(net().state_dict()), 0)


def test_a_full_state_dict_of_rank_0_alone_reaches_all(world_of: WorldOf) -> None:
    world_of(3).run(from_rank_0)


def with_torch(rank: int) -> None:
    torch.manual_seed(rank)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    theirs = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    torch_fully_shard(theirs[0], mesh=mesh)
    torch_fully_shard(theirs, mesh=mesh)
    state: dict[str, Any] = get_model_state_dict(theirs, options=StateDictOptions(full_state_dict=True))
    received = [state if rank == 0 else None]
    dist.broadcast_object_list(received)
    assert received[0] is not None
    ours = fully_shard(plain)
    ours.load_state_dict(received[0])
    assert_same(full_state_dict(ours, rank0_only=False), received[0], 0)


def test_a_full_state_dict_of_torch_fsdp2_loads_into_ours(world_of: WorldOf) -> None:
    world_of(2).run(with_torch)


def save(rank: int, size: int, optimizer_name: str) -> Any:
    model = shard_blocks(net())
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    train(model, optimizer, rank, size, steps=5)
    parts = {"model": sharded_state_dict(model), "optimizer": sharded_optimizer_state_dict(model, optimizer)}
    whole = full_optimizer_state_dict(model, optimizer, rank0_only=False)
    return parts, full_state_dict(model, rank0_only=False), whole


def resume(rank: int, size: int, optimizer_name: str, model_state: Any, optimizer_state: Any) -> None:
    plain = Net()
    plain.load_state_dict(model_state)
    theirs = OPTIMIZERS[optimizer_name](plain.parameters())
    states = {
        index: {
            key: value.clone().view(() if key == "step" else p.shape)
            for key, value in optimizer_state["state"][name].items()
        }
        for index, (name, p) in enumerate(plain.named_parameters())
    }
    theirs.load_state_dict({"state": states, "param_groups": theirs.state_dict()["param_groups"]})
    model = shard_blocks(Net())
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    model.load_state_dict(model_state)
    load_full_optimizer_state_dict(model, optimizer, optimizer_state)
    again = full_optimizer_state_dict(model, optimizer, rank0_only=False)
    for name, state in optimizer_state["state"].items():
        for key, value in state.items():
            assert torch.equal(again["state"][name][key].view(-1), value.view(-1)), (name, key)
    expected = train_alone(plain, theirs, size, steps=5, seed=9)
    assert train(model, optimizer, rank, size, steps=5, seed=9) == expected[rank]


@pytest.mark.parametrize("optimizer_name", ["sgd", "adam"])
@pytest.mark.parametrize("saved_with", [1, 3])
def test_model_and_optimizer_saved_by_one_world_size_go_on_in_another(
    world_of: WorldOf, saved_with: int, optimizer_name: str
) -> None:
    results = world_of(saved_with).run(save, saved_with, optimizer_name)
    _, model_state, optimizer_state = results[0]
    assembled = assemble([parts for parts, _, _ in results])
    for name, value in model_state.items():
        assert torch.equal(assembled["model"][name].view(value.shape), value)
    for name, state in optimizer_state["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(assembled["optimizer"]["state"][name][key]).view(value.shape), value)
    world_of(2).run(resume, 2, optimizer_name, model_state, assembled["optimizer"])


def write_dcp(rank: int, path: str) -> None:
    save_dcp(dtensor_state_dict(shard_blocks(net())), checkpoint_id=path)


def read_dcp(rank: int, path: str) -> None:
    model = shard_blocks(Net())
    load_dcp(dtensor_state_dict(model), checkpoint_id=path)
    assert_same(full_state_dict(model, rank0_only=False), dict(net().state_dict()), 0)


def test_torch_distributed_checkpoint_writes_and_reads_with_another_world_size(
    world_of: WorldOf, tmp_path: Path
) -> None:
    world_of(2).run(write_dcp, str(tmp_path / "saved"))
    world_of(3).run(read_dcp, str(tmp_path / "saved"))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight


def deferred(rank: int, transport: str) -> None:
    torch.manual_seed(7)
    plain = Layers()
    with torch.device("meta"):
        model = Layers()
    for layer in model.layers:
        fully_shard(layer, transport=transport)
    fully_shard(model, transport=transport)
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight in unit layers\.0 is on the meta device"):
        unit_of(model.layers[0]).unshard()
    torch.manual_seed(7)
    materialize(model)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert_same(full_state_dict(model, rank0_only=False), dict(plain.state_dict()), 0)


@pytest.mark.parametrize("transport", ["torch", "shared_memory"])
def test_a_model_built_on_the_meta_device_gets_the_values_of_a_plain_one(world_of: WorldOf, transport: str) -> None:
    world_of(2).run(deferred, transport)


def emptied(rank: int) -> None:
    with torch.device("meta"):
        model = shard_blocks(Net())
    model.to_empty(device="cpu")
    model.load_state_dict(net().state_dict())
    plain = net()
    expected = train_alone(plain, OPTIMIZERS["adam"](plain.parameters()), 2, steps=3)
    assert train(model, OPTIMIZERS["adam"](model.parameters()), rank, 2, steps=3) == expected[rank]


def test_to_empty_and_a_state_dict_materialize_too(world_of: WorldOf) -> None:
    world_of(2).run(emptied)


def without_reset(rank: int) -> None:
    with torch.device("meta"):
        model = shard_blocks(Net())
    with pytest.raises(ValueError, match=r"blocks\.0 is a FSDPBlock .* without reset_parameters\(\)"):
        materialize(model)


def test_a_module_that_cannot_reset_itself_is_named(world_of: WorldOf) -> None:
    world_of(2).run(without_reset)
