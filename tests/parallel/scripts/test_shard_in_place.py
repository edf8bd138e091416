"""``prepare`` for fsdp: a script's own model and optimizer, sharded where they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlaunch.errors import UsageError
from dlaunch.parallel import wrapper_of
from dlaunch.parallel.fsdp import FSDPModule
from dlaunch.parallel.fsdp.fully_shard import unit_of
from dlaunch.parallel.fsdp.wrap_policies import repeated_blocks
from dlaunch.parallel.scripts.prepare import prepare

from ..fsdp.fsdp_models import OPTIMIZERS, Block, Net, assert_same, net, train, train_alone
from ..worlds import WorldOf


def launched(rank: int, function: Any, *arguments: Any) -> Any:
    """As under a launcher, in a world that has its process group already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        patch.setenv("DLAUNCH_PARALLEL", "fsdp")
        return function(rank, *arguments)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}], lr=0.01)


def trains(rank: int) -> None:
    size = dist.get_world_size()
    plain = net()
    theirs = two_groups(plain)
    expected = train_alone(plain, theirs, size, steps=5)
    torch.manual_seed(3 + rank)  # all get the first one's
    model = Net()
    optimizer = two_groups(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    same, its = prepare(model, optimizer, auto_wrap_policy={Block}, find_unused_parameters=True)
    assert same is model
    assert its is optimizer
    assert wrapper_of(model) is model
    assert isinstance(model, Net)
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 4
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()}
    assert train(model, optimizer, rank, size, steps=5) == expected[rank]
    scheduler.step()
    goes_on(model, optimizer, plain, theirs, rank)


def goes_on(model: Net, optimizer: Any, plain: Net, theirs: torch.optim.Optimizer, rank: int) -> None:
    """State dicts are those of the plain script, both ways."""
    state, moments = (
        model.state_dict(),
        copy.deepcopy(optimizer.state_dict()),
    )  # counts of steps are the optimizer's own
    assert_same(state, dict(plain.state_dict()), 0)
    assert_same(state_of(moments), state_of(theirs.state_dict()), 0)
    size = dist.get_world_size()
    train(model, optimizer, rank, size, steps=2, seed=9)
    model.load_state_dict(state)
    optimizer.load_state_dict(moments)
    expected = train_alone(plain, theirs, size, steps=3)
    assert train(model, optimizer, rank, size, steps=3) == expected[rank]


def state_of(moments: dict[str, Any]) -> dict[str, Any]:
    """Flat; the plain optimizer's order."""
    return {f"{number} {key}": v for number, values in sorted(moments["state"].items()) for key, v in values.items()}


@pytest.mark.parametrize("size", [1, 2])
def test_model_and_optimizer_stay_and_train_save_and_load_as_one_process_does(world_of: WorldOf, size: int) -> None:
    world_of(size).run(launched, trains)


def refuses(rank: int) -> None:
    model = net()
    stepped = OPTIMIZERS["adam"](model.parameters())
    train_alone(model, stepped, 1, steps=1)
    with pytest.raises(UsageError, match="the optimizer has state of whole parameters"):
        prepare(model, stepped)
    with pytest.raises(UsageError, match="no option 'bucket_view'"):
        prepare(net(), bucket_view=True)
    prepared = prepare(net())
    with pytest.raises(UsageError, match="sharded already"):
        prepare(prepared)
    with pytest.raises(TypeError, match="a sharded Net can be neither copied nor pickled"):
        copy.deepcopy(prepared)
    lbfgs = torch.optim.LBFGS(prepared.parameters())
    with pytest.raises(RuntimeError, match=r"LBFGS needs whole parameters, and this rank has rows of tokens\.weight"):
        lbfgs.step(lambda: torch.zeros(()))  # type: ignore[no-untyped-call]


def test_what_cannot_be_sharded_is_refused_in_one_sentence(world_of: WorldOf) -> None:
    world_of(2).run(launched, refuses)


def test_without_a_launcher_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("DLAUNCH_PARALLEL", "fsdp")
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    assert prepare(model, optimizer) == (model, optimizer)
    assert type(model) is Net
    assert not dist.is_initialized()


def names_of(root: nn.Module, min_numel: int) -> list[str]:
    names = {id(module): name for name, module in root.named_modules()}
    return [names[id(module)] for module in repeated_blocks(root, min_numel)]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleDict({"a": net(), "b": net()})


def test_blocks_are_repeated_items_of_containers_outermost_first() -> None:
    assert names_of(net(), 1) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names_of(net(), 10_000) == []
    assert names_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 1) == ["0", "2"]
    assert names_of(Pair(), 1) == ["layers.a", "layers.b"]  # not the two that the module itself may use as it likes
    assert names_of(nn.Transformer(8, 2, 2, 2, 8, batch_first=True), 1) == [
        f"{half}.layers.{n}" for half in ("encoder", "decoder") for n in (0, 1)
    ]


def large_blocks(rank: int) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)), nn.Linear(256, 2))
    prepare(model)
    assert [isinstance(layer, FSDPModule) for layer in model] == [True, True, True, False]
    assert len(unit_of(model).parameters) == 2


def test_without_a_policy_large_repeated_blocks_are_units(world_of: WorldOf) -> None:
    world_of(2).run(launched, large_blocks)
